"""One self-contained HTML page from the JSON files of benches. Nothing on it is loaded from anywhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import AccelError
from .charts import COLOURS, Chart
from .report_cells import Section, Table, plain
from .report_sections import section

PALETTE = ("#0072b2", "#c44e00", "#008060", "#b3498c", "#9a6a00", "#3a8fc7", "#6b6b6b")
"""Told apart by most who see colours differently, and dark enough on white."""
LIGHT_PALETTE = ("#6db9ec", "#ff9a57", "#4fd0a8", "#e79ac8", "#e6b84a", "#9ccff2", "#b5b5b5")


def read(path: str) -> dict[str, Any]:
    """A result as `--json` wrote it. Raises AccelError if it cannot be read or is none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise AccelError(f"cannot read {path!r} as JSON: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise AccelError(f'{path!r} is not the result of a bench: there is no list "rows" in it')
    if not isinstance(result.get("environment"), dict):
        raise AccelError(f'{path!r} does not say where it was measured: there is no "environment" in it')
    return result


def page(results: Sequence[tuple[str, dict[str, Any]]], title: str) -> str:
    """The page of (file name, result) pairs, in their order. Raises AccelError on a result that cannot be shown."""
    bodies, entries = [], []
    for i, (name, result) in enumerate(results):
        try:
            found = section(result)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
            raise AccelError(f"{name!r} cannot be shown: {type(error).__name__}: {error}") from error
        bodies.append(_section(f"r{i}", Path(name).name, result, found))
        entries.append(f'<li><a href="#r{i}">{escape(found.heading)}</a></li>')
    contents = f'<nav aria-label="Contents"><ol>{"".join(entries)}</ol></nav>' if len(entries) > 1 else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{_style()}</style>\n</head>\n'
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{contents}\n{''.join(bodies)}</main>\n</body>\n</html>\n"
    )


def _section(identity: str, name: str, result: dict[str, Any], found: Section) -> str:
    remarks = "".join(f"<p>{escape(remark)}</p>\n" for remark in found.remarks)
    charts = "".join(_chart(chart, f"{identity}c{i}") for i, chart in enumerate(found.charts))
    tables = "".join(_table(table, f"{identity}t{i}") for i, table in enumerate(found.tables))
    return (
        f'<section id="{identity}" aria-labelledby="{identity}-h">\n'
        f'<h2 id="{identity}-h">{escape(found.heading)}</h2>\n'
        f"{_environment(name, result)}{remarks}"
        + (f'<div class="charts">\n{charts}</div>\n' if charts else "")
        + f"{tables}</section>\n"
    )


def _environment(name: str, result: dict[str, Any]) -> str:
    facts = [("file", name), *((str(k).replace("_", " "), plain(v)) for k, v in result["environment"].items())]
    pairs = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts)
    command = " ".join(str(word) for word in result.get("command") or ())
    line = f'<p class="command"><code>{escape(command)}</code></p>\n' if command else ""
    return f'<dl class="facts">{pairs}</dl>\n{line}'


def _chart(chart: Chart, identity: str) -> str:
    key = "".join(
        f'<li><svg aria-hidden="true" viewBox="0 0 24 14">{sign}</svg>{escape(name)}</li>' for sign, name in chart.key
    )
    picture = re.sub(r"\bID-([td])\b", rf"{identity}-\1", chart.svg, count=4)
    keys = f'<ul class="key">{key}</ul>' if key else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{keys}{picture}</figure>\n"


def _table(table: Table, identity: str) -> str:
    words = {i for i in range(len(table.columns)) if not all(_is_number(row[i]) for row in table.rows)}

    def kind(i: int) -> str:
        return "" if i in words else ' class="n"'

    head = "".join(f'<th scope="col"{kind(i)}>{escape(name)}</th>' for i, name in enumerate(table.columns))
    rows = []
    for row in table.rows:
        cells = "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(row) if i)
        rows.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>\n')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{identity}"><table>\n'
        f'<caption id="{identity}">{escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
    )


def _is_number(text: str) -> bool:
    """Of numbers, or of several with slashes between them."""
    return all(re.fullmatch(r"-|n/a|[+-]?[\d,]*\.?\d+x?", part) is not None for part in text.split(" / "))


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f".c{i}{{fill:{c}}}.l{i}{{stroke:{c}}}" for i, c in enumerate(palette[:COLOURS]))

    return STYLE + colours(PALETTE) + f"@media screen and (prefers-color-scheme:dark){{{colours(LIGHT_PALETTE)}}}"


STYLE = """
:root{--ink:#1b1b1b;--soft:#595959;--rule:#d5d5d5;--paper:#fff;--band:#f5f5f3;--link:#00548a}
@media screen and (prefers-color-scheme:dark){
:root{--ink:#e8e8e6;--soft:#b0b0ad;--rule:#444;--paper:#161616;--band:#202020;--link:#8ec7f0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0 1rem}
h2{font-size:1.25rem;line-height:1.3;margin:0 0 .6rem}
a{color:var(--link)}
section{border-top:2px solid var(--rule);padding-top:1.2rem;margin-top:2rem}
p{margin:.4rem 0;max-width:75ch}
.facts{display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;margin:0 0 .6rem;font-size:.85rem}
.facts div{display:flex;gap:.4rem;min-width:0}
.facts dt{color:var(--soft);white-space:nowrap}
.facts dd{margin:0;overflow-wrap:anywhere}
.command code{font-size:.8rem;overflow-wrap:anywhere;background:var(--band);padding:.15rem .35rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1.2rem 2rem;margin:1rem 0;
align-items:start}
figure{margin:0;min-width:0;max-width:560px}
figcaption{font-weight:600;margin-bottom:.25rem}
figure>svg{display:block;width:100%;height:auto}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin:0 0 .25rem;padding:0;font-size:.85rem}
.key svg{width:24px;height:14px;margin-right:.35rem;vertical-align:-2px}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .group{font-weight:600}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}.line{fill:none;stroke-width:2}
.scroll{overflow-x:auto;margin:1rem 0}
table{min-width:min(100%,26rem);border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;font-size:1rem;padding-bottom:.3rem}
th,td{padding:.25rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
td:last-child:not(.n){min-width:24ch}
thead th{vertical-align:bottom;border-bottom:2px solid var(--soft);min-width:4.2rem}
tbody th{font-weight:600;white-space:nowrap}
.n{text-align:right;white-space:nowrap}thead .n{white-space:normal}
tbody tr:nth-child(even){background:var(--band)}
@media print{
body{font-size:10pt}main{max-width:none;padding:0}nav{display:none}
.scroll{overflow:visible}table{font-size:6.5pt}th,td{padding:.1rem .2rem;min-width:0!important}
figure,tr,.scroll{break-inside:avoid}h2,caption{break-after:avoid}.charts{grid-template-columns:1fr 1fr}}
"""
