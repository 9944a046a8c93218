"""The start of a step in a graph: slots, positions and lengths, reference by definition, kernel in the interpreter."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.advance import CASES, advance, advance_reference, case_inputs


def expected_of(case):
    """(lengths, slots, positions), row by row."""
    lengths, _, table, page_size, first, _, _ = case_inputs(case)
    slots, positions = [], []
    for row, length in enumerate(lengths.tolist()):
        is_live = row < case.live
        slots.append(int(table[row, length // page_size]) * page_size + length % page_size if is_live else -1)
        positions.append(max(length - int(first[row]), 0) if is_live else 0)
        lengths[row] += is_live
    return lengths, torch.tensor(slots), torch.tensor(positions)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    arguments = case_inputs(case)
    advance(*arguments)
    lengths, slots, positions = expected_of(case)
    assert torch.equal(arguments[0], lengths)
    assert torch.equal(arguments[5], slots)
    assert torch.equal(arguments[6], positions)


def test_steps_cross_pages():
    """Steps follow each other: 16 tokens fill a page, the 17th is in the next."""
    lengths, live = torch.tensor([15, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.tensor([[4, 9], [1, 6]], dtype=torch.int32)
    slots, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    seen = []
    for _ in range(2):
        advance_reference(lengths, live, table, 16, torch.tensor([0, 2], dtype=torch.int32), slots, positions)
        seen.append((slots.tolist(), positions.tolist()))
    assert seen == [([79, 19], [15, 1]), ([144, 20], [16, 2])]
    assert lengths.tolist() == [17, 5]


def check_kernel(case):
    from deepseek_accel.kernels.advance import launch

    arguments, expected = case_inputs(case), expected_of(case)
    # A table that is part of a wider one, as in a graph's buffer.
    wide = torch.full((len(case.lengths), arguments[2].shape[1] + 3), -5, dtype=torch.int32)
    table = wide[:, : arguments[2].shape[1]]
    table.copy_(arguments[2])
    launch(*arguments[:2], table, *arguments[3:])
    for actual, wanted in zip((arguments[0], *arguments[5:]), expected, strict=True):
        assert torch.equal(actual, wanted), (actual, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case):
    interpret(check_kernel, case)
