"""Ranking drafts, and what speculating gains where guesses are right by a draw."""

import json

import pytest
import torch
from transformers import GenerationMixin

from deepseek_accel import OptimizeConfig, cli, optimize
from deepseek_accel.bench import auto, greedy, speculation, tables
from deepseek_accel.bench.shapes import Point
from deepseek_accel.errors import AccelError
from deepseek_accel.models import load_tiny
from deepseek_accel.passes.speculative import Speculative


def test_acceptance_is_what_was_forced():
    result = speculation.run("tiny", [Point(1, 32), Point(2, 16)], [3], [0.0, 1.0], 41, "cpu")
    never, always = result["rows"][0::2], result["rows"][1::2]
    assert [row["tokens_per_step"] for row in never] == [1.0, 1.0]
    assert all(row["tokens_per_step"] == 4.0 for row in always)  # a token of the prompt, then ten steps of four
    assert all(row["check_ms"] > row["plain_ms"] * 0.3 > 0 for row in result["rows"])
    assert len(tables.speculation_table(result).rows) == 4
    for bad in ({"drafts": [0]}, {"drafts": [9]}, {"acceptances": [1.5]}, {"new_tokens": 8}):
        fields = {"drafts": [3], "acceptances": [0.5], "new_tokens": 64} | bad
        with pytest.raises(AccelError):
            speculation.run(
                "tiny", [Point(1, 32)], fields["drafts"], fields["acceptances"], fields["new_tokens"], "cpu"
            )


def test_calls_draw_alike():
    """Of several calls with draws of their own the fastest would be the luckiest."""
    model, _ = load_tiny()
    optimize(model, OptimizeConfig((*OptimizeConfig.lossless().passes, Speculative("ngram", 3)), allow_skips=True))
    model._accel_speculation.source = speculation.ForcedSource()
    model._accel_speculation.loop_type = speculation.forced_loop(0.5)
    first, second = (greedy.generate(model, torch.tensor([[5, 6, 7]]), 40).tolist() for _ in range(2))
    assert first == second


def test_with_packed_weights():
    result = speculation.run("tiny", [Point(1, 32)], [3], [1.0], 41, "cpu", int4=True)
    (row,) = result["rows"]
    assert row["tokens_per_step"] == 4.0 and result["int4"]
    assert "four bits" in str(tables.speculation_table(result).title)


def test_drafts_are_ranked(capsys):
    words = ["drafts", "tiny", "nonsense", "ngram", "tiny-draft", "--prompts", "2", "--new-tokens", "40"]
    assert cli.main([*words, "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if "tiny-draft" in line]  # a line for each stage
    assert told == [
        "preparing tiny-draft",
        *(f"tiny-draft, {n} a step" for n in ("1 guess(es)", "4 guess(es)", "none")),
    ]
    assert "loading tiny" in said.err.splitlines()
    rows = json.loads(said.out)["rows"]
    assert [row["draft"] for row in rows][-1] == "nonsense" and "not a directory" in rows[-1]["detail"]
    gains = [row["predicted_speed_up"] for row in rows[:2]]
    assert gains == sorted(gains, reverse=True) and all(0 < row["acceptance"] < 1 for row in rows[:2])
    assert {row["draft"]: row["parameters"] for row in rows}["tiny-draft"] == 656_000
    assert cli.main(["drafts", "tiny", "nonsense", "--device", "cpu"]) == 1
    assert cli.main(["drafts", "no-such-model", "ngram"]) == 2
    assert cli.main(["bench", "speculation", "--drafts", "three"]) == 2


def test_auto_against_plain(capsys, tmp_path, monkeypatch):
    made, ran = [], []

    def speculative(draft, number):
        made.append((draft if isinstance(draft, str) else draft.config.num_hidden_layers, number))
        return Speculative(draft, number)

    def spying(model, *args, **kwargs):
        ran.append(("_accel_speculation" in vars(model), kwargs["do_sample"]))
        return stock(model, *args, **kwargs)

    stock = GenerationMixin.generate
    monkeypatch.setattr(auto, "Speculative", speculative)
    monkeypatch.setattr(GenerationMixin, "generate", spying)
    words = ["bench", "auto", "--drafts", "ngram,nonsense,tiny-draft", "--calls", "2", "--new-tokens", "24"]
    assert cli.main([*words, "--device", "cpu", "--json", str(tmp_path / "auto.json")]) == 0
    result = json.loads((tmp_path / "auto.json").read_text())
    rows = [row for row in result["rows"] if row["draft"] != "nonsense"]
    assert [(row["draft"], row["text"], row["rows"]) for row in rows] == [
        (draft, text, n)
        for draft in ("ngram", "tiny-draft")
        for text, n in (("code", 1), ("random tokens", 1), ("8 rows of code", 8))
    ]
    assert made == [("ngram", "auto")] * 3 + [(2, "auto")] * 3
    assert all(row["equal"] for row in rows), rows  # fp32: the text is the model's
    assert all(row["guesses"] > 0 for row in rows if (row["draft"], row["text"]) != ("ngram", "random tokens"))
    for row in rows:
        assert row["speed_up"] == pytest.approx(row["plain_ms"] / row["auto_ms"]) and row["auto_ms"] > 0
    turns = [ran[i : i + 6] for i in range(0, len(ran), 6)]  # one that builds and two timed, plain and guessing
    assert [[guesses for guesses, _ in turn] for turn in turns] == [[False, True, False, True, True, False]] * 6
    assert [{sampling for _, sampling in turn} for turn in turns] == [{False}, {True}, {False}] * 2
    wrong = [row for row in result["rows"] if row["draft"] == "nonsense"]
    assert len(wrong) == 3 and all("not a directory" in row["detail"] and row["equal"] is None for row in wrong)
    said = capsys.readouterr()
    assert sum(line == "tiny-draft, code" for line in said.err.splitlines()) == 1 and "plain call" in said.out
    rows[0]["equal"] = False
    assert auto.exit_code(result) == 3 and auto.exit_code({"rows": wrong}) == 1
    assert cli.main(["bench", "auto", "--new-tokens", "8"]) == 2
    assert cli.main(["bench", "auto", "--model", "v2-lite", "--device", "cpu", "--drafts", "ngram"]) == 2
