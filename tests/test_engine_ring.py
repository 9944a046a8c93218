"""The tokenizer ring: order, bounds, errors that stay with their text, threads that end; and text in pieces."""

import asyncio
import logging
import threading
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_accel import AccelError, PlanError
from deepseek_accel.engine.incremental import IncrementalText
from deepseek_accel.engine.ring import MAX_GATHERED, TokenizerRing
from deepseek_accel.models import heldout_documents, path

WAIT = 20


@cache
def bundled():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path())


@cache
def byte_fallback():
    """As SentencePiece vocabularies of Llama are: words with a leading mark, bytes for all else."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁a", "b", "c", "é", "▁cat"]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def in_python():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


class Odd:
    """A tokenizer without Rust: slower for shorter texts, not for two threads at once, and it dislikes some texts."""

    is_fast = False

    def __init__(self):
        self.busy = False

    def __call__(self, texts, **options):
        assert not self.busy, "two threads in one tokenizer"
        self.busy = True
        time.sleep(0.02 / (1 + sum(map(len, texts))))
        self.busy = False
        if any("boom" in text for text in texts):
            raise ValueError("boom")
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def decode(self, ids, **options):
        if 0 in ids:
            raise ValueError("zero")
        return "".join(map(chr, ids))


class Gate:
    """A callback that waits to be let through."""

    def __init__(self):
        self.open, self.entered, self.got = threading.Event(), threading.Event(), []

    def __call__(self, outcome):
        self.entered.set()
        assert self.open.wait(WAIT)
        self.got.append(outcome)


def ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("deepseek-accel")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = len(ours())
    yield
    assert len(ours()) == before


@pytest.mark.parametrize("tokenizer", [bundled, in_python], ids=["fast", "in python"])
def test_the_ids_of_the_tokenizer_in_order(tokenizer):
    tokenizer, got = tokenizer(), []
    texts = [document[i : i + 50 * (1 + i % 7)] for document in heldout_documents()[:3] for i in range(0, 2_000, 100)]
    batches = [texts[i : i + 5] for i in range(0, len(texts), 5)]
    with TokenizerRing(tokenizer) as ring:
        for batch in batches:
            ring.encode(batch, got.append)
        ring.encode(["no special"], got.append, add_special_tokens=False)
        ring.encode([], got.append)
    assert [[tokens.ids for tokens in batch] for batch in got[:-2]] == [tokenizer(b)["input_ids"] for b in batches]
    assert got[-2][0].ids == tokenizer("no special", add_special_tokens=False)["input_ids"] and got[-1] == []
    assert all(tokens.tensor().tolist() == tokens.ids for batch in got for tokens in batch)
    facts = ring.facts()
    assert (facts["texts"], facts["in_flight"]) == (len(texts) + 1, 0)
    assert facts["tokens"] == sum(len(tokens) for batch in got for tokens in batch)


def test_order_is_kept_when_later_texts_are_done_first():
    got = []
    with TokenizerRing(Odd(), num_threads=4) as ring:
        for i in range(60):
            ring.encode(["x" * ((i * 7) % 10)], lambda outcome, i=i: got.append((i, len(outcome[0]))))
    assert got == [(i, (i * 7) % 10) for i in range(60)]


def test_more_batches_than_the_ring_holds_have_to_wait():
    gate = Gate()
    with TokenizerRing(bundled(), num_batches=3) as ring:
        for i in range(3):
            ring.encode([str(i)], gate)
        with pytest.raises(TimeoutError, match="3 batches"):
            ring.encode(["late"], gate, timeout=0.05)
        threading.Timer(0.1, gate.open.set).start()
        ring.encode(["3"], gate)  # waits until the callback lets go
        assert gate.open.is_set() and ring.facts()["blocked_seconds"] > 0.1
    assert [outcome[0].ids for outcome in gate.got] == [bundled()(str(i))["input_ids"] for i in range(4)]


def test_a_callback_that_asks_a_full_ring_for_more_is_told_so():
    errors = []

    def greedy(outcome):
        try:
            ring.encode(["more"], errors.append)
        except AccelError as error:
            errors.append(str(error))

    with TokenizerRing(bundled(), num_batches=1) as ring:
        ring.encode(["x"], greedy)
    assert len(errors) == 1 and "submit" in errors[0]


@pytest.mark.parametrize("tokenizer", [bundled, Odd])
def test_an_error_stays_with_its_text(tokenizer):
    tokenizer, got = tokenizer(), []
    with TokenizerRing(tokenizer) as ring:
        ring.encode(["good", None, "boom", "better"], got.append)
        ring.encode([7], got.append)
        ring.encode(["fine"], got.append)
    first, none, boom, last = got[0]
    assert first.ids == tokenizer(["good"])["input_ids"][0] and last.ids == tokenizer(["better"])["input_ids"][0]
    assert isinstance(none, TypeError) and isinstance(got[1][0], TypeError) and "int" in str(got[1][0])
    assert isinstance(boom, ValueError) == isinstance(tokenizer, Odd)
    assert got[2][0].ids == tokenizer(["fine"])["input_ids"][0]
    assert ring.facts()["failed_texts"] == 2 + isinstance(tokenizer, Odd)


def test_parts_of_a_text_never_become_those_of_another():
    got, options = [], {"truncation": True, "max_length": 4, "return_overflowing_tokens": True}
    with TokenizerRing(bundled()) as ring:
        ring.encode(["def main(): return 1 + 2 + 3 + 4", "import os"], got.append, **options)
    (long, short), ids = got[0], bundled()("import os")["input_ids"]
    assert isinstance(long, ValueError) and "several lists" in str(long) and short.ids == ids


def test_a_callback_that_raises_stops_nobody(caplog):
    got, texts = [], []

    def bad(*what):
        raise RuntimeError("not mine")

    with caplog.at_level(logging.ERROR), TokenizerRing(bundled()) as ring:
        ring.encode(["a"], bad)
        ring.submit("b", bad)
        ring.decode([70], bad)
        ring.stream(bad).put([70])
        ring.submit("c", got.append)
        ring.decode(bundled()("d", add_special_tokens=False)["input_ids"], texts.append)
    assert got[0].ids == bundled()("c")["input_ids"] and texts == ["d"]
    assert caplog.text.count("RuntimeError: not mine") == 4


def test_single_texts_never_block_and_are_gathered():
    gate, got = Gate(), []
    with TokenizerRing(bundled(), num_batches=1, num_threads=1) as ring:
        ring.encode(["first"], gate)
        assert gate.entered.wait(WAIT)  # the only worker is busy, the only batch taken
        begun = time.perf_counter()
        for i in range(3 * MAX_GATHERED):
            ring.submit(f"text {i}", got.append)
        assert time.perf_counter() - begun < 1 and ring.facts()["waiting"] == 3 * MAX_GATHERED
        gate.open.set()
    assert [tokens.ids for tokens in got] == bundled()([f"text {i}" for i in range(3 * MAX_GATHERED)])["input_ids"]
    assert ring.facts()["batches"] == 4


def test_asyncio_waits_without_blocking_the_loop():
    async def main(ring):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(*(ring.aencode([f"async {i}", None]) for i in range(40)))
        ticking.cancel()
        abandoned = asyncio.create_task(ring.aencode(["nobody waits for this"]))
        await asyncio.sleep(0)
        abandoned.cancel()
        return found, ticks

    with TokenizerRing(Odd(), num_batches=2) as ring:
        found, ticks = asyncio.run(main(ring))
    assert [outcome[0].ids for outcome in found] == [list(map(ord, f"async {i}")) for i in range(40)]
    assert all(isinstance(outcome[1], TypeError) for outcome in found) and ticks > 5


def test_padding_that_somebody_else_sets_disturbs_nothing():
    """Calls with padding and truncation change a fast tokenizer; another thread would fail ("Already borrowed")."""
    import copy

    tokenizer = copy.deepcopy(bundled())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)  # left behind in it
    stop, got = threading.Event(), []

    def pad():
        while not stop.is_set():
            tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
            tokenizer(["a"])

    thread = threading.Thread(target=pad)
    thread.start()
    texts = [document[:2_000] for document in heldout_documents()[:4]]
    with TokenizerRing(tokenizer) as ring:
        for _ in range(20):
            ring.encode(texts, got.append)
    stop.set()
    thread.join()
    expected = bundled()(texts)["input_ids"]
    assert len(got) == 20 and all([tokens.ids for tokens in outcome] == expected for outcome in got)


def test_closing_finishes_what_was_given_and_ends_the_threads():
    got, ring = [], TokenizerRing(Odd())
    assert len(ours()) == 3
    for i in range(8):
        ring.encode([str(i)], got.append)
        ring.submit(str(i), got.append)
    ring.close()
    ring.close()
    assert len(got) == 16 and not ours()
    for closed in (
        lambda: ring.encode(["a"], got.append),
        lambda: ring.submit("a", got.append),
        lambda: ring.decode([65], got.append),
        lambda: ring.stream(lambda piece, last: None).put([65]),
    ):
        with pytest.raises(AccelError, match="closed"):
            closed()


def test_cancelling_answers_what_has_not_begun():
    gate, got, ring = Gate(), [], TokenizerRing(bundled(), num_batches=4, num_threads=1)
    ring.encode(["begun"], gate)
    assert gate.entered.wait(WAIT)
    for i in range(3):
        ring.encode([str(i), "x"], got.append)
    ring.submit("single", lambda outcome: got.append([outcome]))
    blocked = []

    def late():
        try:
            ring.encode(["late"], got.append)
        except AccelError as error:
            blocked.append(error)

    waiting = threading.Thread(target=late)
    waiting.start()
    closing = threading.Thread(target=ring.close, kwargs={"cancel": True})
    closing.start()
    waiting.join(WAIT)  # it does not wait for room any more
    gate.open.set()
    closing.join(WAIT)
    assert len(blocked) == 1 and not ours()
    assert [len(outcome) for outcome in got] == [2, 2, 2, 1]
    assert all(isinstance(each, AccelError) for outcome in got for each in outcome) and len(gate.got[0]) == 1


def test_a_callback_cannot_close_its_ring(caplog):
    with TokenizerRing(bundled()) as ring:
        ring.encode(["a"], lambda outcome: ring.close())
    assert "cannot wait for its own thread" in caplog.text


def test_closing_without_waiting_ends_the_threads_too():
    got, ring = [], TokenizerRing(bundled())
    for i in range(5):
        ring.submit(str(i), got.append)
    ring.encode(["a"], lambda outcome: ring.close(wait=False))
    deadline = time.monotonic() + WAIT
    while ours() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not ours() and len(got) == 5


def test_what_it_refuses():
    for wrong in ({"num_batches": 0}, {"num_threads": 0}):
        with pytest.raises(PlanError):
            TokenizerRing(Odd(), **wrong)


def test_streams_give_their_text_in_order_and_end_once():
    texts = ["def f(x):\n    return '😀 naïve 日本語'\n" * 3, "plain words only", "", heldout_documents()[0][:600]]
    got = [[] for _ in texts]
    with TokenizerRing(bundled()) as ring:
        streams = [ring.stream(lambda piece, last, i=i: got[i].append((piece, last))) for i in range(len(texts))]
        ids = [bundled()(text, add_special_tokens=False)["input_ids"] for text in texts]
        for step in range(max(map(len, ids))):
            for stream, own in zip(streams, ids, strict=True):
                if step < len(own):
                    stream.put(own[step : step + 1])
        for stream in streams:
            stream.end()
        with pytest.raises(AccelError, match="ended"):
            streams[0].put([1])
    assert ["".join(piece for piece, _ in pieces) for pieces in got] == texts
    assert all([last for _, last in pieces] == [False] * (len(pieces) - 1) + [True] for pieces in got)


def test_a_stream_that_fails_fails_alone():
    bad, good = [], []
    with TokenizerRing(Odd()) as ring:
        broken, fine = ring.stream(lambda *w: bad.append(w)), ring.stream(lambda *w: good.append(w))
        broken.put([65])
        broken.put([0])
        fine.put([66])
        broken.put([67])
        broken.end()
        fine.end()
        ring.decode([0], lambda text: bad.append(text))
    assert "".join(piece for piece, _ in good) == "B" and good[-1][1]
    errors = [each[0] for each in bad[:-1] if isinstance(each[0], ValueError)]
    assert len(errors) == 1 and isinstance(bad[-1], ValueError)


def pieces(tokenizer, ids, cuts=()):
    text, out, start = IncrementalText(tokenizer), [], 0
    for stop in [*sorted(cuts), len(ids)] if cuts else range(1, len(ids) + 1):
        out.append(text.put(ids[start:stop]))
        start = stop
    return [*out, text.end()]


@pytest.mark.parametrize("tokenizer", [bundled, byte_fallback, in_python])
@settings(deadline=None)
@given(text=st.text(st.sampled_from("the cat éß日本😀👩‍👩‍👧\n\t.  "), max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_pieces_make_the_whole_text(tokenizer, text, cuts):
    tokenizer = tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for found in (pieces(tokenizer, ids), pieces(tokenizer, ids, [cut for cut in cuts if cut <= len(ids)])):
        assert "".join(found) == whole
        assert not any("�" in piece for piece in found)  # no part of a character


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_come_out_as_decode_shows_them(values):
    """Any bytes at all: the vocabulary has a token for each."""
    tokenizer = bundled()
    ids = [token for value in values for token in [tokenizer.convert_tokens_to_ids(byte_letters()[value])]]
    assert None not in ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@cache
def byte_letters():
    """How byte-level vocabularies write bytes: themselves where printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def test_words_are_not_held_back_and_special_tokens_leave_no_trace():
    tokenizer = byte_fallback()
    words = tokenizer.convert_tokens_to_ids(["▁the", "</s>", "▁cat", "<s>", "<s>", "▁a", "b"])
    found = pieces(tokenizer, words)
    assert found == ["the", "", " cat", "", "", " a", "b", ""]
    assert "".join(found) == tokenizer.decode(words, skip_special_tokens=True)


def test_broken_bytes_are_not_held_back_for_ever():
    tokenizer = bundled()
    broken = tokenizer.convert_tokens_to_ids(byte_letters()[0xE2])
    text = IncrementalText(tokenizer)
    found = [text.put([broken]) for _ in range(200)]
    assert len(text._ids) < 60  # else every token costs more than the one before it
    assert "".join([*found, text.end()]) == tokenizer.decode([broken] * 200)
