"""The tokenizer ring with a device: copies from page-locked buffers that are used again, on a stream of their own."""

import threading

import pytest
import torch

from deepseek_accel.engine.ring import TokenizerRing
from deepseek_accel.models import heldout_documents, path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path())


def test_ids_arrive_while_buffers_are_used_again(tokenizer):
    """Many more batches than buffers, of growing size, behind a busy device; each is read only when all are staged."""
    document = "\n".join(heldout_documents())
    batches = [[document[i : i + 300 * (1 + i % 40)] for i in range(start, start + 4)] for start in range(0, 400, 4)]
    got = []
    busy = torch.randn(4096, 4096, device="cuda")
    with TokenizerRing(tokenizer, num_batches=2, device="cuda") as ring:
        for batch in batches:
            busy = (busy @ busy).clamp(-1, 1)
            ring.encode(batch, got.append)
    assert all(tokens.tensor().device.type == "cuda" for outcome in got for tokens in outcome)
    ids = [tokens.tensor().tolist() for outcome in got for tokens in outcome]
    assert ids == [each for batch in batches for each in tokenizer(batch)["input_ids"]]


def test_the_consumers_stream_waits_for_the_copy(tokenizer):
    """The ring's stream is held up; what the consumer queues must still see the ids, without the host waiting."""
    got, arrived = [], threading.Event()
    text = heldout_documents()[0][:4_000]
    with TokenizerRing(tokenizer, device="cuda") as ring:
        with torch.cuda.stream(ring._buffers._stream):
            torch.cuda._sleep(200_000_000)
        ring.encode([text], lambda outcome: (got.extend(outcome), arrived.set()))
        assert arrived.wait(20)
        assert not got[0]._copied.query()  # still on its way
        doubled = got[0].tensor() * 2
        assert doubled.tolist() == [2 * each for each in tokenizer(text)["input_ids"]]


def test_staging_does_not_disturb_a_capture(tokenizer):
    """Graphs are captured per thread (`capture_error_mode="thread_local"`), while workers allocate and copy."""
    got = []
    texts = [document[:3_000] for document in heldout_documents()[:8]]
    a = torch.randn(256, 256, device="cuda")
    with TokenizerRing(tokenizer, device="cuda") as ring:
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for i in range(40):
                    if i % 4 == 0:
                        ring.encode(texts, got.append)
                    b = a @ a
            graph.replay()
        torch.cuda.synchronize()
    assert torch.allclose(b, a @ a)
    assert [tokens.tensor().tolist() for tokens in got[-1]] == tokenizer(texts)["input_ids"]
    assert not [each for outcome in got for each in outcome if isinstance(each, Exception)]
