"""docs/claims.md has every claim; its commands are ours, its links lead somewhere, its numbers are in the files."""

import json
import re
import shlex
from pathlib import Path

import pytest

from deepseek_accel import cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/claims.md"
TEXT = PAGE.read_text("utf-8")

GROUPS = {"S30-S35": range(30, 36), "S36-S38": range(36, 39)}
CLAIMS = [*(f"S{n}" for n in (*range(1, 23), 24, 25, 27)), *GROUPS, "S39"]
"""Every claim of the reports, in order; two groups of them are claimed together."""
VERDICTS = ("better", "equal", "worse", "not comparable", "not measured", "not built")


def table(text):
    """The cells of the first table's rows."""
    lines = [line for line in text.splitlines() if line.startswith("| [S")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


ROWS = {re.match(r"\[(S[\d\-S]+)\]", row[0])[1]: row for row in table(TEXT)}
SECTIONS = dict(re.findall(r"^### (S[\d\-S]+)\n(.*?)(?=^### |\Z)", TEXT, re.DOTALL | re.MULTILINE))


def commands(section):
    """The indented commands of a section, continued lines joined."""
    blocks = re.findall(r"(?:^    .*\n?)+", section, re.MULTILINE)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


COMMANDS = [(claim, command) for claim, section in SECTIONS.items() for command in commands(section)]


def anchor(heading):
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_claim_has_a_row_and_a_section():
    assert list(ROWS) == list(SECTIONS) == CLAIMS
    for claim, (link, system, published, _, verdict) in ROWS.items():
        assert link == f"[{claim}](#{claim.lower()})" and system and published
        for part in verdict.split(":")[0].split(", "):
            assert part.split(" (")[0] in VERDICTS, (claim, verdict)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_is_measured_says_how(claim):
    """A verdict on a number has a command and a file or page with the number; what is not there has nothing."""
    verdict, section = ROWS[claim][4], SECTIONS[claim]
    if verdict.startswith("not built"):
        assert not commands(section) and "Not built" in section
    elif not verdict.startswith("not measured"):
        assert commands(section) and ROWS[claim][3], claim
        assert re.search(r"\]\([\w\-/]+\.(json|md)", section) or "CPU, commit" in section
        if not verdict.startswith("not comparable"):
            assert re.search(r"\d", ROWS[claim][3])


@pytest.mark.parametrize(("claim", "command"), COMMANDS)
def test_commands_can_be_given(claim, command):
    words = shlex.split(command)
    if words[0] == "deepseek-accel":
        arguments = cli.parser().parse_args(words[1:])  # ends the process, if it does not know one
        assert callable(arguments.run)
    elif words[:3] == ["python", "-m", "pytest"]:
        files = [word for word in words[3:] if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)
        if "-k" in words:
            assert words[words.index("-k") + 1] in (ROOT / files[0]).read_text("utf-8")
    else:
        assert words[:2] == ["python", "-c"] and len(words) == 3
        compile(words[2].strip(), command, "exec")


def test_there_are_commands_of_all_kinds():
    assert len(COMMANDS) > 25
    assert {shlex.split(command)[0] for _, command in COMMANDS} == {"deepseek-accel", "python"}


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", TEXT)
    assert len(links) > 50
    for file, heading in links:
        target = PAGE.parent / file if file else PAGE
        assert target.is_file(), file
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), (file, heading)


def rows_of(name):
    return json.loads((ROOT / f"docs/bench/{name}.json").read_text("utf-8"))["rows"]


def test_drafts_are_those_of_the_file():
    names = {"ngram": "n-grams", "tiny-draft": "draft model", "mtp": "MTP layer", "self": "itself, half the experts"}
    for row in rows_of("cpu-tiny-drafts"):
        best = f" with {row['best_drafts']}" if row["best_drafts"] else ""
        line = f"| {names[row['draft']]} | {row['acceptance']:.2f} | {row['accepted_per_step'] / 4:.0%} "
        assert f"{line}| {row['predicted_speed_up']:.2f}x{best} |".replace("%", " %") in TEXT


def test_loading_is_that_of_the_files():
    for name, load, title in (
        ("cpu-host-4bit", "load_quantized", "`load_quantized`"),
        ("cpu-host-16bit", "from_pretrained", "transformers' `from_pretrained`"),
    ):
        rows = {row["what"]: row for row in rows_of(name)}
        size = json.loads((ROOT / f"docs/bench/{name}.json").read_text("utf-8"))["bytes"] / 1e9
        files = f"reading the {name.rpartition('-')[2].replace('bit', '-bit')} files"
        for what, shown in ((load, title), ("read the files", files)):
            cached, dropped = rows[f"{what}, cached"], rows[f"{what}, not cached"]
            speeds = [f"{row['gigabytes_per_second']:.3g}" for row in (cached, dropped)]
            line = next(line for line in TEXT.splitlines() if line.startswith(f"| {shown} |"))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert float(cells[1]) == pytest.approx(size, abs=0.005)
            assert [float(cell) for cell in cells[2:4]] == [float(speed) for speed in speeds]
            assert int(cells[4]) == dropped["major_faults"]


def test_times_of_caches_are_those_of_the_file():
    rows = {(row["batch"], row["variant"]): row["itl_ms"] for row in rows_of("cpu-tiny-cache")}
    gains = {key: rows[key[0], "full"] / ms for key, ms in rows.items()}
    top, window = gains[1, "top_attention_50"], gains[1, "window_50"]
    assert f"({top:.2f}x at 1x2048, window {window:.2f}x)" in ROWS["S2"][3]
    several = f"gave {gains[8, 'top_attention_50']:.2f}x and 0.56x, and {gains[8, 'window_50']:.2f}x and 1.58x with the"
    assert several in " ".join(SECTIONS["S2"].split())


def test_adaptive_gating_is_that_of_the_file():
    rows = {row["variant"]: row for row in rows_of("h200-deepseek-moe-16b")}
    order = ("top1", "top2", "target 0.75", "all")
    a, b, c, d = (f"{rows[variant]['tokens_per_second']:.0f}" for variant in order)
    cell = f"{a} / {b} / {c} tokens/s for top-1 / top-2 / adaptive (target 0.75), {d} with all six"
    names = ("int4 top1", "int4 top2", "int4 target 0.75", "int4")
    a, b, c, d = (f"{rows[name]['tokens_per_second']:.0f}" for name in names)
    assert f"{cell}; in four bits {a} / {b} / {c}, {d};" in ROWS["S5"][3]
    a, b, c, d = (
        f"{rows[f'{kind}target 0.75']['itl_ms'] / rows[f'{kind}{other}']['itl_ms']:.2f}"
        for kind in ("", "int4 ")
        for other in ("top1", "top2")
    )
    said = f"top-1 is {a} times as fast as target 0.75 and top-2 {b} times, in four bits {c} and {d} times."
    assert said in " ".join(SECTIONS["S5"].split())


def test_guesses_are_those_of_the_files():
    def pair(file, point, value):
        rows = [row for row in rows_of(file) if (row["point"], row["drafts"]) == (point, 3)]
        return " and ".join(f"{value(row):.2f}x" for row in rows)

    def gain(row):
        return row["speed_up"]

    v2, v3 = "h200-speculation-v2-lite", "h200-speculation-v3-4layer"
    low, high = pair(v2, "1x1024", gain).split(" and ")
    steps = pair(v2, "1x1024", lambda row: row["tokens_per_step"] * row["plain_ms"] / row["check_ms"])
    cell = f"V2-Lite: {low} and {high} (at 0.62 and 0.72) at batch 1, the best of three calls, by its steps {steps};"
    many = f"{pair(v2, '32x1024', gain)} with 32 rows; V3, 4 layers, batch 1: {pair(v3, '1x1024', gain)}"
    assert f"{cell} {many}" in ROWS["S6"][3]
