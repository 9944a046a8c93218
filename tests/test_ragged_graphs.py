"""Buffers of graphs of ragged rows: whose pages they hold."""

from types import SimpleNamespace

import torch

from deepseek_accel.generation.ragged_graphs import RaggedBuffers


class Pool:
    def __init__(self, pages):
        self.pages, self.table = pages, SimpleNamespace(version=3)

    def block_table(self):
        return torch.tensor(self.pages, dtype=torch.int32)


def test_pages_of_a_pool_that_looks_like_the_one_before():
    """An engine's rows may get the number, the version and the addresses of those of an engine that is gone."""
    model = SimpleNamespace(embedding=torch.zeros(4, 8), dtype=torch.float32, device=torch.device("cpu"), layers=[0])
    buffers = RaggedBuffers.make(2, 1, 3, SimpleNamespace(model=model))
    held = [SimpleNamespace(storage=torch.zeros(8))]
    arguments = (torch.zeros(2, 1, dtype=torch.int64), [[0], [0]], [[0], [0]], [1, 1], [0, 0])
    first = Pool([[1, 2, 3], [4, 5, 6]])
    buffers.set(*arguments, first, [0, 1], held)
    assert torch.equal(buffers.block_table, first.block_table())
    first.pages = [[9, 9, 9], [9, 9, 9]]  # its version says that nothing changed: it is not read again
    buffers.set(*arguments, first, [0, 1], held)
    assert buffers.block_table[0].tolist() == [1, 2, 3]
    number = id(first)
    del first
    others = [Pool([[6, 5, 4], [3, 2, 1]]) for _ in range(50)]
    second = next((pool for pool in others if id(pool) == number), others[0])
    buffers.set(*arguments, second, [0, 1], held)
    assert torch.equal(buffers.block_table, second.block_table())
