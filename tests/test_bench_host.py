"""`bench host` reads and loads real checkpoints and says how fast, and times a page table."""

import json

import pytest

from deepseek_accel import cli, models
from deepseek_accel.bench import host
from deepseek_accel.errors import AccelError


def test_both_kinds_of_checkpoint_are_loaded_and_every_row_is_kept(tmp_path, capsys):
    packed = tmp_path / "packed"
    assert cli.main(["quantize", str(models.path()), str(packed), "--method", "rtn"]) == 0
    sizes = {}
    for name, loader in ((str(packed), "load_quantized"), ("tiny", "from_pretrained")):
        file = tmp_path / f"{loader}.json"
        command = ["bench", "host", "--model", name, "--device", "cpu", "--repeats", "1", "--json", str(file)]
        assert cli.main(command) == 0
        result = json.loads(file.read_text())
        assert result["command"] == ["deepseek-accel", *command] and "complete" not in result
        assert result["environment"]["hardware"] and result["environment"]["torch"]
        rows = {row["what"]: row for row in result["rows"]}
        assert f"{loader}, cached" in capsys.readouterr().out and f"{loader}, not cached" in rows
        loads = [row for row in rows.values() if row["gigabytes_per_second"] is not None]
        assert len(loads) == 4 and len(rows) == 8
        for row in loads:
            assert row["gigabytes_per_second"] == pytest.approx(result["bytes"] / row["seconds"] / 1e9)
        # reading is a part of loading
        assert rows["read the files, cached"]["seconds"] < rows[f"{loader}, cached"]["seconds"]
        grown = rows["page table from 1,024 to 32,768 tokens"]["seconds"]
        stepped = rows["page table by the next page"]["seconds"]
        assert 0 < stepped < grown < 0.1  # 496 pages against one
        sizes[loader] = result["bytes"]
    assert sizes["load_quantized"] < 0.6 * sizes["from_pretrained"]


def test_wrong_requests_are_refused(tmp_path):
    (tmp_path / "config.json").write_text((models.path() / "config.json").read_text())
    with pytest.raises(AccelError, match="no safetensors"):
        host.run(str(tmp_path))
    with pytest.raises(AccelError, match="no such directory"):
        host.run(str(tmp_path / "absent"))
    with pytest.raises(AccelError, match="at least one repeat"):
        host.run("tiny", repeats=0)
