"""`bench cache` on a small model: rows are what they say, and what cannot be measured says so."""

import json

import pytest
import torch

from deepseek_accel.bench import cache, tables
from deepseek_accel.bench.shapes import Point, Subject
from deepseek_accel.cli import main
from deepseek_accel.config import OptimizeConfig
from deepseek_accel.errors import AccelError
from deepseek_accel.testing import tiny_model


@pytest.fixture(scope="module")
def result():
    subject = Subject("small", tiny_model("deepseek_v3").eval())
    variants = ("full", "reuse_prefix")
    options = cache.Options("small", (Point(2, 320),), variants=variants, new_tokens=4, repeats=1)
    return cache.run(options, subject=subject)


def test_rows(result):
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["full", "reuse_prefix"]
    full, reuse = rows.values()
    assert full["status"] == reuse["status"] == "ok", (full["detail"], reuse["detail"])
    # 320 tokens, then calls of 1, 2, 1 and 4 whose last token is not in the cache: 327 in pages of 64, two rows
    model = tiny_model("deepseek_v3")
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    assert full["bytes_held"] == 6 * 64 * 2 * model.config.num_hidden_layers * width * 4
    assert full["second_ttft_ms"] is None and reuse["second_ttft_ms"] > 0
    assert all(row["ttft_ms"] > 0 and row["itl_ms"] is not None for row in rows.values())


def test_table_and_json(result, tmp_path):
    tables.write_json(tmp_path / "cache.json", result)
    assert json.loads((tmp_path / "cache.json").read_text())["rows"] == result["rows"]
    console = tables.console()
    with console.capture() as capture:
        console.print(tables.cache_table(result))
    assert "reuse_prefix" in capture.get() and "2x320" in capture.get()


def test_a_variant_that_fails_is_a_row(monkeypatch):
    subject = Subject("small", tiny_model("llama").eval())
    monkeypatch.setattr(cache, "_measure", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    options = cache.Options("small", (Point(1, 32),), variants=("full",))
    (row,) = cache.run(options, subject=subject)["rows"]
    assert row["status"] == "error" and "no memory" in row["detail"]
    assert cache.exit_code([row]) == 1


def test_wrong_options(capsys):
    with pytest.raises(AccelError, match="unknown variants half; known: full, fp8_e4m3"):
        cache.Options("small", (Point(1, 32),), variants=("half",))
    assert main(["bench", "cache", "--variants", "half"]) == 2
    assert "unknown variants half" in capsys.readouterr().err


def test_every_variant_is_a_config():
    for fields in cache.CONFIGS.values():
        assert OptimizeConfig.from_dict(cache.config_of(fields, 4096)).passes
    config = OptimizeConfig.from_dict(cache.config_of(cache.CONFIGS["top_attention_50"], 4096)).to_dict()
    assert config["kv_cache"]["eviction"]["top_attention"]["budget"] == 2048
