"""`bench tokenizing`: both ways give the same ids, a wrong ring is not timed, and the numbers fit together."""

import json

import pytest
import torch

from deepseek_accel import AccelError
from deepseek_accel.bench import tokenizing
from deepseek_accel.bench.tokenizing import MODEL, WAITING, Options
from deepseek_accel.cli import main

SMALL = ["--step-ms", "3", "--batch", "2", "--prompt-tokens", "200", "--batches", "6", "--repeats", "1"]
WORDS = ["bench", "tokenizing", *SMALL, "--device", "cpu"]


def test_the_command_writes_what_it_measured(tmp_path, capsys):
    assert main([*WORDS, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["consumer"] for row in result["rows"]] == [WAITING, MODEL]
    waits = result["rows"][0]
    assert waits["status"] == "ok" and waits["tokenise_ms"] > 0
    assert waits["inline_requests_per_second"] < 2 / 3e-3  # two texts a step of 3 ms: no more can be
    assert waits["ring_requests_per_second"] < 2 / 3e-3
    assert waits["ratio"] == waits["ring_requests_per_second"] / waits["inline_requests_per_second"]
    assert 1 < waits["overlap"] <= 2
    assert "req/s ring" in capsys.readouterr().out


def test_a_ring_that_gives_other_ids_is_not_timed(monkeypatch, capsys):
    right = tokenizing.TokenizerRing.encode

    def swapped(self, texts, then, **options):
        right(self, texts[::-1], then, **options)

    monkeypatch.setattr(tokenizing.TokenizerRing, "encode", swapped)
    assert main(WORDS) == 3
    assert "differ" in capsys.readouterr().out


def test_texts_are_as_long_as_said_and_differ():
    _, tokenizer = tokenizing.load_tiny()
    batches = tokenizing.texts(tokenizer, Options(batch=3, prompt_tokens=100, batches=4))
    assert [len(batch) for batch in batches] == [3] * 4 and len({text for batch in batches for text in batch}) == 12
    assert all(95 <= len(tokenizer(text)["input_ids"]) <= 102 for batch in batches for text in batch)
    with pytest.raises(AccelError, match="ask for fewer"):
        tokenizing.texts(tokenizer, Options(prompt_tokens=10**7))


def test_the_ring_overlaps_with_a_device_that_works():
    """A tokenizer that only waits, and a step that only waits: together they must take little more than one of them."""
    import time

    class Slow:
        is_fast = True

        def __call__(self, texts, **options):
            if len(texts) > 1:
                time.sleep(0.01)
            return {"input_ids": [[1, 2] for _ in texts]}

        def decode(self, ids, **options):
            return ""

    batches, device = [["a", "b"]] * 20, torch.device("cpu")

    def consume(ids):
        time.sleep(0.01)

    inline, spent = tokenizing.in_line(Slow(), batches, consume, device)
    ring, _ = tokenizing.through_ring(Slow(), batches, consume, Options(), device)
    assert inline > 0.4 > spent > 0.2
    assert ring < 0.8 * inline


def test_options_that_make_no_sense():
    for wrong in ({"batch": 0}, {"step_ms": ()}, {"step_ms": (0.0,)}, {"num_batches": 0}):
        with pytest.raises(AccelError):
            Options(**wrong)
    assert main(["bench", "tokenizing", "--step-ms", "x"]) == 2
