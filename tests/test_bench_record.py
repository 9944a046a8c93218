"""A bench that is killed keeps what it has measured."""

import json
import sys

import pytest

from deepseek_accel import cli
from deepseek_accel.bench import cache, generate, speculation, tables
from deepseek_accel.bench.record import Record
from deepseek_accel.bench.shapes import Point, Subject
from deepseek_accel.testing import tiny_model


class Killed(BaseException):
    """Not an Exception: benches make rows of those."""


def killed_after(rows: int, seen: list):
    def keep(result):
        seen.append([dict(row) for row in result["rows"]])
        if len(result["rows"]) == rows:
            raise Killed

    return keep


def run_generate(keep):
    options = generate.Options("small", (Point(1, 8), Point(2, 8)), new_tokens=3, repeats=1)
    return generate.run(options, subject=Subject("small", tiny_model("llama")), keep=keep)


def run_cache(keep):
    options = cache.Options("small", (Point(1, 40), Point(2, 40)), ("full", "window_50"), new_tokens=3, repeats=1)
    return cache.run(options, subject=Subject("small", tiny_model("llama")), keep=keep)


def run_speculation(keep):
    return speculation.run("tiny", [Point(1, 8), Point(2, 8)], [1], [0.0, 1.0], 32, "cpu", keep=keep)


@pytest.mark.parametrize("run", [run_generate, run_cache, run_speculation])
def test_rows_are_told_one_by_one(run):
    seen = []
    with pytest.raises(Killed):
        run(killed_after(3, seen))
    assert [len(rows) for rows in seen] == [1, 2, 3]
    times = [next(value for key, value in row.items() if key.endswith("_ms") and value) for row in seen[-1]]
    assert all(time > 0 for time in times)
    assert seen[-1][:2] == seen[1], "a row that was told does not change"


def test_the_file_and_the_lines_of_a_killed_run(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.json"
    real = tables.lines

    def lines(table):
        if table.row_count == 2:
            raise Killed
        return real(table)

    monkeypatch.setattr(tables, "lines", lines)
    words = ["bench", "speculation", "--points", "1x8", "--drafts", "1", "--new-tokens", "32", "--device", "cpu"]
    with pytest.raises(Killed):
        cli.main([*words, "--acceptance", "0,0.5,1", "--json", str(file)])
    kept = json.loads(file.read_text())
    assert kept["complete"] is False and kept["command"][:3] == ["deepseek-accel", "bench", "speculation"]
    assert [row["forced"] for row in kept["rows"]] == [0.0, 0.5] and kept["environment"]["torch"]
    assert capsys.readouterr().err.count("batch x prompt 1x8, drafts 1, acceptance (forced) 0.00, plain step, ms ") == 1


def test_the_file_of_a_whole_run_is_not_marked(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = ["bench", "cache", "--model", "tiny", "--points", "1x8", "--variants", "full", "--new-tokens", "3"]
    assert cli.main([*words, "--device", "cpu", "--repeats", "1", "--json", str(file)]) == 0
    assert "complete" not in json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert "batch x context 1x8, cache full, TTFT ms" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, capsys):
    table = tables.table("t", ["a", "b"], [["1", "-"]])
    record = Record(str(tmp_path / "no" / "such.json"), ["x"], lambda result: table)
    record({"rows": []})
    record({"rows": []})
    said = capsys.readouterr().err
    assert said.count("could not write") == 1 and said.count("a 1\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no /dev/stdout")
def test_a_device_is_written_not_replaced():
    tables.write_json("/dev/null", {"rows": [float("nan")]})
    with open("/dev/null") as null:
        assert null.read() == ""
