"""`bench quality` on short contexts: rows are what they say, questions need what was said long before."""

import json

import pytest
import torch

from deepseek_accel.bench import quality, tables
from deepseek_accel.cli import main
from deepseek_accel.errors import AccelError
from deepseek_accel.models import load_tiny


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CONTEXT", 192), ("PREFILL", 160), ("CHUNK", 80), ("FAR", 64), ("NEAR", 48)):
            patch.setattr(quality, name, value)
        patch.setattr(quality, "questions", lambda tokenizer, found=quality.questions: found(tokenizer)[:12])
        options = quality.Options((100, 50), ("window", "top_attention"), contexts=2, questions=2, device="cpu")
        return quality.run(options)


def test_rows(result):
    rows = {(row["policy"], row["percent"]): row for row in result["rows"]}
    assert list(rows) == [("full", 100), ("window", 50), ("top_attention", 50)]
    full, window, top = rows.values()
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["detail"] for row in rows.values()]
    assert full["change_percent"] == 0 and full["agreement_percent"] == 100 and 1 < full["perplexity"] < 100
    assert window["change_percent"] != 0 and window["agreement_percent"] < 100
    assert window["tokens_held"] == [96] * 5 and sum(top["tokens_held"]) <= 5 * 96
    # 192 tokens in pages of 64, two rows, 5 layers of 80 fp32 numbers; half of them in two pages
    assert full["bytes_held"] == 3 * 64 * 2 * 5 * 80 * 4 and window["bytes_held"] == full["bytes_held"] * 2 // 3
    assert full["retrieved"] == full["questions"] and window["questions"] == full["questions"]


def test_losses_are_those_of_one_forward():
    model, tokenizer = load_tiny(dtype=torch.float32)
    from deepseek_accel.cache import paged_cache

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CONTEXT", 40), ("PREFILL", 32), ("CHUNK", 16), ("TOGETHER", 2)):
            patch.setattr(quality, name, value)
        ids = quality.contexts(tokenizer, 3)
        scores = quality.score(model, lambda: paged_cache(model), ids, lambda count: None)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[:, 32:]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 33:], reduction="none")
    assert torch.allclose(scores.losses, expected, atol=1e-4) and torch.equal(scores.best, logits.argmax(-1))


def test_questions_end_in_the_beginning_of_a_name():
    _, tokenizer = load_tiny()
    asked = quality.questions(tokenizer)
    assert len(asked) > 20
    for question in asked:
        assert len(question.prompt) + len(question.answer) == quality.CONTEXT
        assert quality.FAR <= question.distance < quality.CONTEXT
        name = tokenizer.decode([question.prompt[-1], *question.answer]).strip()
        early = tokenizer.decode(question.prompt[: len(question.prompt) - quality.FAR + 64])
        assert name.split()[-1].lstrip("(.[{'\"=*@!&-/,:") in early


def test_table_and_json(result, tmp_path):
    tables.write_json(tmp_path / "quality.json", result)
    assert json.loads((tmp_path / "quality.json").read_text())["rows"] == result["rows"]
    console = tables.console()
    with console.capture() as capture:
        console.print(tables.quality_table(result))
    assert "2 contexts of 192 tokens" in capture.get() and "full" in capture.get()


def test_picture(result, tmp_path):
    pytest.importorskip("matplotlib")
    tables.write_png(tmp_path / "quality.png", result)
    assert (tmp_path / "quality.png").stat().st_size > 5000


def test_wrong_options(capsys):
    for options, what in (
        (dict(policies=("best",)), "unknown policies best; known: window"),
        (dict(budgets=(3,)), "from 5 to 100"),
        (dict(contexts=0), "at least one context"),
        (dict(model="v2-lite"), "bundled model"),
    ):
        with pytest.raises(AccelError, match=what):
            quality.Options(**options)
    assert main(["bench", "quality", "--budgets", "half"]) == 2
    assert "whole percentages" in capsys.readouterr().err
