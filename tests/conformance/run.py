"""Run transformers' own model tests stock and optimized, and write the failures side by side to docs/support.md.

    python tests/conformance/run.py --transformers-tree PATH [pytest arguments]

PATH must hold `tests/` of the installed transformers version. The source distribution holds the common mixins, which is
enough: `pip download --no-deps --no-binary :all: transformers==VERSION`. Needs `parameterized`, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- conformance -->", "<!-- /conformance -->"
MODES = ("stock", "optimize")


def run(mode: str, tree: str, file: Path, extra: list[str]) -> dict[str, Any]:
    """One pytest run; its outcomes as `plugin.Recorder` wrote them."""
    target = str(HERE / "test_transformers.py")
    command = [sys.executable, "-m", "pytest", target, f"--transformers-tree={tree}", f"--{mode}"]
    command += [f"--conformance-json={file}", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run([*command, "-q", "--timeout=60", *extra], cwd=ROOT, env=environment, check=False)
    if not file.is_file():
        raise SystemExit(f"the {mode} run wrote no outcomes; see the messages above")
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results


def table(stock: dict[str, Any], optimized: dict[str, Any], note: str = "") -> str:
    """Markdown under a heading of the version: counts by family, what differs, what was left out."""
    before, after = stock["tests"], optimized["tests"]
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * 6)
    differing = []
    for name in sorted(before.keys() | after.keys()):
        old, new = (tests.get(name, {"outcome": "not run", "message": ""}) for tests in (before, after))
        row = counts[name.partition("::")[0].removesuffix("ModelTest")]
        row[0] += 1
        row[1] += new["outcome"] == "skipped"
        row[2] += new.get("optimized_models", 0) > 0
        row[3] += old["outcome"] == "failed"
        row[4] += new["outcome"] == "failed"
        row[5] += new["outcome"] == "failed" and old["outcome"] != "failed"
        if old["outcome"] != new["outcome"]:
            message = re.sub(r"\s+", " ", new["message"] or old["message"]).replace("|", "\\|")[:160]
            differing.append(f"| `{name}` | {old['outcome']} | {new['outcome']} | {message} |")
    lines = [
        f"### transformers {optimized['transformers']}",
        "",
        f"{optimized['tests_are'].capitalize()}, torch {optimized['torch']}.{note and ' ' + note}",
        "",
        "| family | tests | skipped | on optimized models | fail stock | fail optimized | fail only optimized |",
        "|---|---|---|---|---|---|---|",
        *(f"| {family} | {' | '.join(map(str, row))} |" for family, row in sorted(counts.items())),
        "",
    ]
    if differing:
        lines += ["| outcome differs | stock | optimized | message |", "|---|---|---|---|", *differing, ""]
    else:
        lines += ["No outcome differs.", ""]
    lines += [f"Left out: {count} tests ({why})." for why, count in sorted(optimized["left_out"].items())]
    lines += [
        "Never run: pipeline tests, which download tokenizers. Skipped by transformers: what needs a GPU or is slow."
    ]
    return "\n".join(lines).rstrip()


def write(page: Path, section: str) -> None:
    """Put `section` between the markers of `page`, in place of the one with the same heading. Newest version first."""
    old = page.read_text(encoding="utf-8") if page.is_file() else "# What is supported\n"
    if BEGIN not in old:
        old = f"{old.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, _, rest = old.partition(BEGIN)
    between, _, tail = rest.partition(END)
    sections = {s.partition("\n")[0]: s.strip() for s in re.split(r"^(?=### )", between, flags=re.M) if s.strip()}
    sections[section.partition("\n")[0]] = section

    def version(heading: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", heading)]

    text = "\n\n".join(sections[heading] for heading in sorted(sections, key=version, reverse=True))
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers-tree", required=True, metavar="PATH")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep the outcomes here, reuse those present")
    parser.add_argument("--note", default="", help="a sentence for the page, such as where the tree is from")
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.results or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        results = []
        for mode in MODES:
            file = directory / f"{mode}.json"
            if file.is_file():
                results.append(json.loads(file.read_text(encoding="utf-8")))
            else:
                results.append(run(mode, options.transformers_tree, file, extra))
        write(PAGE, table(*results, options.note))


if __name__ == "__main__":
    main()
