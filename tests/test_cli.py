"""The command line: demo and plan, messages and exit codes."""

import json
import subprocess
import sys

import pytest
import torch

import deepseek_accel
from deepseek_accel import cli, models
from deepseek_accel.bench import demo, tables
from deepseek_accel.families import known
from deepseek_accel.testing import tiny_model


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepseek_accel", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_demo_prints_one_json_object_and_nothing_else():
    words = "--prompt", "def add(a, b):", "--max-new-tokens", "4", "--repeats", "1", "--device", "cpu"
    done = run("demo", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens_equal"] and result["restored_tokens_equal_stock"]
    assert result["continuation"] == result["stock_continuation"] != ""
    assert result["dtype"] == "float32" and result["new_tokens"] == 4
    assert {row["pass"]: row["status"] for row in result["report"]["passes"]}["attention"] == "applied"
    assert result["report"]["counters"]["attention: absorbed"] > 0
    for name in ("stock", "optimized"):
        assert result[f"{name}_ttft_ms"] > 0 and result[f"{name}_cache_bytes"] > 0
    # a latent and a rotary key, for every token that was fed back, in every layer
    fed = result["prompt_tokens"] + result["new_tokens"] - 1
    assert result["stock_cache_bytes"] == fed * 5 * (64 + 16) * 4


def test_demo_fails_when_tokens_differ():
    same = {"tokens_equal": True, "restored_tokens_equal_stock": True, "dtype": "float32"}
    assert demo.exit_code(same) == 0
    assert demo.exit_code(same | {"tokens_equal": False}) == 1
    assert demo.exit_code(same | {"tokens_equal": False, "dtype": "bfloat16"}) == 0
    assert demo.exit_code(same | {"restored_tokens_equal_stock": False}) == 1


def test_demo_shows_what_it_measured(monkeypatch, capsys):
    monkeypatch.setattr(models, "load_tiny", lambda **_: (tiny_model("deepseek_v3", vocab_size=2048), tokenizer()))
    words = ["--prompt", "import os", "--max-new-tokens", "3", "--repeats", "1", "--device", "cpu"]
    assert cli.main(["demo", *words]) == 0
    shown = capsys.readouterr().out
    for text in (
        "the same tokens",
        "further token, ms",
        "cache, bytes",
        "kv_cache",
        "gives stock's tokens again",
        "torch",
    ):
        assert text in shown


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.path())


@pytest.mark.parametrize("words", [["--max-new-tokens", "1"], ["--repeats", "0"], ["--device", "cuda:99"]])
def test_demo_names_a_wrong_number(words, capsys):
    assert cli.main(["demo", *words]) == 2
    assert capsys.readouterr().err.startswith("deepseek-accel: ")


def test_plan_of_the_bundled_checkpoint(capsys):
    assert cli.main(["plan", str(models.path()), "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    model, _ = models.load_tiny()
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["dtype"] == "bfloat16"
    assert result["cache_bytes_per_token"] == 5 * (64 + 16) * 2
    intended = deepseek_accel.plan(model)
    assert result["passes"] == intended.rows()  # notes too: the plan is for the device, not for "meta"


def test_plan_as_text(capsys):
    assert cli.main(["plan", str(models.path()), "--device", "cpu", "--config", '{"attention": {}}']) == 0
    shown = capsys.readouterr().out
    assert "DeepseekV3ForCausalLM" in shown and "bytes per token" in shown
    assert "attention" in shown and "kv_cache" not in shown
    assert " planned " in shown and "applied" not in shown  # nothing is, yet


def test_a_plan_says_planned_and_a_report_applied():
    model = tiny_model("deepseek_v3")
    intended = deepseek_accel.plan(model)
    assert "applied" not in str(intended) + intended._repr_html_()
    deepseek_accel.optimize(model)
    done = deepseek_accel.report(model)
    assert "planned" not in str(done) + done._repr_html_()
    words = {"planned": "applied", "skipped": "skipped"}
    assert [words[row["status"]] for row in intended.rows()] == [row["status"] for row in done.passes]
    assert {row["status"] for row in done.passes} == {"applied", "skipped"}


def write_config(folder, **config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("model_type", [name for name in known() if name != "deepseek_v32"])
def test_plan_of_every_family(model_type, tmp_path, capsys):
    from deepseek_accel.testing import tiny_config

    tiny_config(model_type).save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == model_type


def test_plan_ignores_remote_code_of_a_known_architecture(tmp_path, capsys):
    """As the published V2 and V3 checkpoints are: they bring code, and transformers does not need it."""
    from deepseek_accel.testing import tiny_config

    config = tiny_config("deepseek_v3").to_dict() | {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code was run')")
    assert cli.main(["plan", write_config(tmp_path, **config), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "DeepseekV3ForCausalLM" in shown and "stored as fp8" in shown


def test_plan_of_the_bundled_model_by_name(capsys):
    assert cli.main(["plan", "tiny", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_dir"] == "tiny"


def test_plan_of_bad_directories(tmp_path, capsys):
    def message(directory: str, *words: str) -> str:
        assert cli.main(["plan", directory, *words]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    assert "no such directory" in message(str(tmp_path / "absent"))
    assert "no config.json" in message(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in message(str(tmp_path))
    assert "no class for model_type=None" in message(write_config(tmp_path))
    own = write_config(tmp_path, model_type="deepseek_x", auto_map={"AutoConfig": "configuration_x.Config"})
    assert "auto_map" in message(own) and "never runs code" in message(own)
    assert "this version knows" in message(write_config(tmp_path, model_type="gpt2"))
    assert "no language model" in message(write_config(tmp_path, model_type="vit"))
    assert "cannot read" in message(write_config(tmp_path, model_type="deepseek_v3", num_hidden_layers="many"))


def test_plan_names_a_wrong_pass(capsys):
    assert cli.main(["plan", str(models.path()), "--config", '{"atention": {}}']) == 2
    assert "did you mean 'attention'" in capsys.readouterr().err
    assert cli.main(["plan", str(models.path()), "--config", "absent.json"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_planning_takes_no_memory():
    from transformers import AutoModelForCausalLM

    from deepseek_accel.testing import tiny_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True))
    cli.place(model, torch.device("cpu"))
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() <= 8 for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_wrong_usage_ends_with_2(capsys):
    for words in ([], ["bench"], ["plan"], ["demo", "--dtype", "int8"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2


def test_the_command_loads_nothing_heavy():
    code = (
        "import sys; from deepseek_accel.cli import parser; parser(); "
        "print([m for m in ('transformers.generation', 'rich', 'triton', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_numbers_never_have_an_exponent():
    assert [tables.number(x) for x in (None, 0.0, 0.00001234, 1.5, 46.71, 285.4, 12345.6)] == [
        "-",
        "0",
        "0.000012",
        "1.50",
        "46.7",
        "285",
        "12,346",
    ]
    assert json.loads(tables.to_json({"a": float("nan"), "b": [float("inf"), 1.5]})) == {"a": None, "b": [None, 1.5]}
