"""Results as tables on the terminal, JSON files and pictures."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import AccelError
from .environment import describe


def console(*, stderr: bool = False) -> Any:
    """A rich console. Where output goes to a file, lines are as long as they need to be."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else 200)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with what is done next. A bar on a terminal, else one line each; both on stderr.

    total: how many times it will be called, or a guess: with more the bar grows.
    """
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            begun += 1
            bar.update(task, description=text, completed=begun - 1, total=max(total, begun))

        yield step


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits without an exponent, or "-"."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}".rstrip(".")
    return text if "e" not in text else f"{value:.{digits + 3}f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        words = i < left or i == len(columns) - 1
        table.add_column(Text(column), justify="left" if words else "right", no_wrap=i < left)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def generate_table(result: dict[str, Any]) -> Any:
    """One row per point and variant; times are medians, ratios are stock's time divided by the row's."""
    columns = ["batch x prompt", "variant", "TTFT ms", "to stock", "ITL ms", "to stock", "tokens/s"]
    columns += ["weights GB", "peak GiB"]
    columns += ["of prefill", "KV bytes", "experts", "floor ms", "x floor", "checked"]
    rows = []
    for row in result["rows"]:
        peaks = (row["peak_bytes_above_weights"], row["prefill_peak_bytes_above_weights"])
        rows.append(
            [
                f"{row['batch']}x{row['prompt_length']}",
                row["variant"],
                number(row["ttft_ms"]),
                ratio(row["ttft_ratio"]),
                number(row["itl_ms"]),
                ratio(row["itl_ratio"]),
                number(row["tokens_per_second"]),
                "-" if row["weight_bytes"] is None else f"{row['weight_bytes'] / 1e9:.2f}",
                *("n/a" if peak is None else f"{peak / 2**30:.2f}" for peak in peaks),
                "-" if row["kv_bytes_per_token_and_layer"] is None else f"{row['kv_bytes_per_token_and_layer']:,.0f}",
                number(row["experts_per_step"]),
                number(row["floor_ms"]),
                ratio(row["floor_ratio"]),
                row["detail"] if row["status"] == "ok" else f"{row['status']}: {row['detail']}",
            ]
        )
    first = result["rows"][0]
    title = (
        f"{describe(result['environment'])}\nmodel {first['model']}, {first['dtype']}, {first['new_tokens']} new tokens"
    )
    title += "; peak: above the weights; KV: per token and layer; experts: distinct, per step and layer"
    if (copy := result["environment"].get("copy_bytes_per_second")) is not None:
        title += f"\nfloor: weights touched and keys read at the measured copy speed of {copy / 1e9:,.0f} GB/s"
    return table(title, columns, rows)


def soak_line(soak: dict[str, Any]) -> str:
    """What many calls left behind, in one line."""
    if "error" in soak:
        return f"soak of {soak['calls']:,} calls: error: {soak['error']}"
    held = soak["bytes_held"]
    return (
        f"soak, {soak['calls']:,} calls of mixed batch and length: {soak['what']} held {held[0][1]:,} bytes after the "
        f"first call, {held[-1][1]:,} after the last ({soak['bytes_grown']:+,}), at most {max(b for _, b in held):,}; "
        f"ITL at {soak['point']} {number(soak['itl_first_ms'])} ms first, {number(soak['itl_last_ms'])} ms last"
    )


def gating_table(result: dict[str, Any]) -> Any:
    """One row per rule and target."""
    columns = ["rule", "target", "experts a token", "perplexity", "more than stock"]
    rows = [
        [
            row["rule"],
            f"{row['target']:.3g}",
            f"{row['experts']:.2f}",
            f"{row['perplexity']:.3f}",
            f"{row['loss_percent']:+.2f} %",
        ]
        for row in result["rows"]
    ]
    title = f"{describe(result['environment'])}\nmodel {result['model']}, calibrated on "
    title += f"{result['calibration_tokens']:,} tokens, scored on {result['scored_tokens']:,} others"
    if "brute_force" in result:
        title += (
            f"\nleaving out one rank of one layer: r = {result['brute_force']['correlation']:.3f} with the prediction"
        )
    return table(title, columns, rows)


def cache_table(result: dict[str, Any]) -> Any:
    """One row per point and kind of cache; "to full" is a row's value divided by that of the full, plain cache."""
    columns = ["batch x context", "cache", "TTFT ms", "second", "ITL ms", "to full", "tokens/s", "held MB", "to full"]
    columns += ["peak MB", "remarks"]
    rows = []
    for row in result["rows"]:
        same = [r for r in result["rows"] if (r["batch"], r["context"]) == (row["batch"], row["context"])]
        full: dict[str, Any] = next((r for r in same if r["variant"] == "full"), {})

        def to_full(name: str, row: dict[str, Any] = row, full: dict[str, Any] = full) -> str:
            return ratio(row[name] / full[name]) if row[name] and full.get(name) else "-"

        megabytes = [None if row[n] is None else row[n] / 1e6 for n in ("bytes_held", "peak_bytes_above_weights")]
        rows.append(
            [
                f"{row['batch']}x{row['context']}",
                row["variant"],
                number(row["ttft_ms"]),
                number(row["second_ttft_ms"]),
                number(row["itl_ms"]),
                to_full("itl_ms"),
                number(row["tokens_per_second"]),
                number(megabytes[0]),
                to_full("bytes_held"),
                number(megabytes[1]),
                row["detail"],
            ]
        )
    return table(f"{result['rows'][0]['model']} on {describe(result['environment'])}", columns, rows)


def quality_table(result: dict[str, Any]) -> Any:
    """One row per policy and budget; the bytes are those held after the last token, as a fraction of the full cache."""
    columns = ["policy", "budget", "perplexity", "change %", "same token %", "retrieved", "held", "by layer", "remarks"]
    full = result["rows"][0]["bytes_held"]
    rows = [
        [
            row["policy"],
            f"{row['percent']} %",
            number(row["perplexity"]),
            "-" if row["change_percent"] is None else f"{row['change_percent']:+.2f}",
            number(row["agreement_percent"]),
            "-" if row["questions"] is None else f"{row['retrieved']}/{row['questions']}",
            ratio(row["bytes_held"] / full) if row["bytes_held"] and full else "-",
            " ".join(map(str, row["tokens_held"] or [])),
            row["detail"],
        ]
        for row in result["rows"]
    ]
    what = f"{result['contexts']} contexts of {result['context_tokens']} tokens, {result['model']}, {result['dtype']}"
    return table(f"{what}, on {describe(result['environment'])}", columns, rows)


def speculation_table(result: dict[str, Any]) -> Any:
    rows = [
        [
            row["point"],
            str(row["drafts"]),
            f"{row['forced']:.2f}",
            number(row["plain_ms"]),
            number(row["check_ms"]),
            ratio(row["check_ms"] / row["plain_ms"]),
            number(row["tokens_per_step"]),
            ratio(row["speed_up"]),
        ]
        for row in result["rows"]
    ]
    columns = ("batch x prompt", "drafts", "acceptance (forced)", "plain step, ms", "check, ms", "check / step",
               "tokens a step", "speed-up")  # fmt: skip
    packed = ", weights in four bits" if result["int4"] else ""
    title = f"{describe(result['environment'])}\n{result['model']}{packed}: guesses of no cost, right by a draw"
    return table(title, columns, rows, left=1)


def auto_table(result: dict[str, Any]) -> Any:
    rows = [
        [
            row["draft"],
            row["text"],
            number(row["plain_ms"]),
            number(row["auto_ms"]),
            ratio(row["speed_up"]),
            "-" if row["left_alone"] is None else str(row["left_alone"]),
            row["detail"] or ("equal" if row["equal"] else "other tokens"),
        ]
        for row in result["rows"]
    ]
    columns = ("draft", "text", "plain call, ms", "with auto, ms", "speed-up", "calls left alone", "tokens")
    calls = f"{result['calls']} calls of {result['new_tokens']} tokens each"
    title = f"{describe(result['environment'])}\n{result['target']}: {calls}, {result['clock']} time"
    return table(title, columns, rows)


def drafts_table(result: dict[str, Any]) -> Any:
    rows = [
        [
            row["draft"],
            f"{row['parameters']:,}" if row["parameters"] else "",
            number(row["guess_ms"]),
            f"{row['acceptance']:.2f}" if row["acceptance"] is not None else "",
            number(row["accepted_per_step"]),
            str(row["best_drafts"]) if row["best_drafts"] is not None else "",
            ratio(row["predicted_speed_up"]),
            row["detail"],
        ]
        for row in result["rows"]
    ]
    columns = ("draft", "parameters", "a guess, ms", "acceptance", "accepted of 4", "best number", "predicted", "")
    return table(f"drafts for {result['target']}, {result['tokens']:,} tokens written", columns, rows, left=1)


def ops_table(result: dict[str, Any]) -> Any:
    """One row per op and shape."""
    columns = ["op", "shape", "us", "GB/s", "TFLOP/s", "% of copy", "to reference", "error", "checked"]
    rows = [
        [
            row["op"],
            row["shape"],
            number(row["microseconds"]),
            number(row["gigabytes_per_second"]),
            number(row["teraflops_per_second"]),
            number(row["percent_of_copy"]),
            ratio(row["reference_ratio"]),
            "-" if row["error"] is None else f"{row['error']:.1e}",
            "yes" if row["status"] == "ok" else f"{row['status']}: {row['detail']}",
        ]
        for row in result["rows"]
    ]
    facts = result["environment"]
    dtype = result["rows"][0]["dtype"] if result["rows"] else ""
    title = f"{describe(facts)}\n{dtype}, copy speed {facts['copy_bytes_per_second'] / 1e9:,.0f} GB/s"
    return table(title, columns, rows)


def passes_table(title: str, passes: Sequence[dict[str, Any]]) -> Any:
    """The rows of a Plan or a Report."""
    rows = [
        [
            row["pass"],
            row["status"],
            row["effect"],
            str(row["edits"]),
            "; ".join([*(f"skipped {text}" for text in row["skipped"]), *row["notes"]]),
        ]
        for row in passes
    ]
    return table(title, ["pass", "status", "effect", "edits", "why and how"], rows, left=3)


def demo_view(result: dict[str, Any]) -> list[Any]:
    """What `deepseek-accel demo` prints, top to bottom."""
    rows = [
        [
            "first token, ms",
            number(result["stock_ttft_ms"]),
            number(result["optimized_ttft_ms"]),
            ratio(result["ttft_ratio"]),
        ],
        [
            "further token, ms",
            number(result["stock_itl_ms"]),
            number(result["optimized_itl_ms"]),
            ratio(result["itl_ratio"]),
        ],
        ["cache, bytes", f"{result['stock_cache_bytes']:,}", f"{result['optimized_cache_bytes']:,}", ""],
    ]
    title = (
        f"{describe(result['environment'])}\nmodel {result['model']}, {result['dtype']}, 1x{result['prompt_tokens']}"
    )
    times = table(f"{title}, {result['new_tokens']} new tokens", ["", "stock", "optimized", "faster"], rows, left=1)
    same = "the same tokens" if result["tokens_equal"] else "DIFFERENT TOKENS"
    views: list[Any] = [
        f"prompt ends with:\n{result['prompt_end']}\n",
        f"continuation (stock and optimized: {same}):\n{result['continuation']}\n",
    ]
    if not result["tokens_equal"]:
        views.append(f"stock's continuation:\n{result['stock_continuation']}\n")
    views += [times, passes_table("what optimize(model) did", result["report"]["passes"])]
    back = "gives stock's tokens again" if result["restored_tokens_equal_stock"] else "does NOT give stock's tokens"
    return [*views, f"restore(model): the model {back}."]


def plan_view(result: dict[str, Any]) -> list[Any]:
    """What `deepseek-accel plan` prints."""
    lines = [
        f"{result['architecture']} ({result['model_type']}), {result['layers']} layers, on {result['device']}",
        f"parameters: {result['parameters']:,}, {result['weight_bytes']:,} bytes in {result['dtype']}",
        f"cache: {result['cache_bytes_per_token']:,} bytes per token, "
        f"{result['cache_bytes_per_token_and_layer']:,} of each layer",
        *result["remarks"],
    ]
    return ["\n".join(lines), passes_table("what optimize(model) would do", result["passes"])]


def lines(table: Any) -> list[str]:
    """Each row of a table as one line that stands alone: every cell with something in it after its column's name."""
    names = [str(column.header) for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    return [
        ", ".join(f"{name} {cell}".strip() for name, cell in zip(names, row, strict=True) if cell not in ("", "-"))
        for row in rows
    ]


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write the result. Infinite and NaN numbers become null. A file is replaced whole, so it is never half one."""
    text, target = to_json(result) + "\n", Path(path)
    if target.exists() and not target.is_file():  # such as /dev/stdout
        target.write_text(text, encoding="utf-8")
        return
    part = target.with_name(target.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def to_json(result: dict[str, Any]) -> str:
    return json.dumps(_plain(result), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def require_pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only. Raises AccelError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise AccelError(
            "a picture needs matplotlib, which is not installed: `pip install 'deepseek-accel[plots]'`"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def write_png(path: str, result: dict[str, Any]) -> None:
    """Times by point and variant, or what `bench quality` found by budget."""
    if result.get("bench") == "quality":
        _draw_quality(path, result)
    else:
        _draw_times(path, result)


def _draw_quality(path: str, result: dict[str, Any]) -> None:
    """Change of perplexity and share of names retrieved against bytes held, a line per policy."""
    pyplot = require_pyplot()
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for policy in dict.fromkeys(row["policy"] for row in rows[1:]):
        own = [rows[0], *(row for row in rows if row["policy"] == policy)]
        held = [100 * row["bytes_held"] / rows[0]["bytes_held"] for row in own]
        axes[0].plot(held, [row["change_percent"] for row in own], marker="o", label=policy)
        asked = [row["questions"] for row in own]
        if all(asked):
            axes[1].plot(held, [100 * r["retrieved"] / n for r, n in zip(own, asked, strict=True)], marker="o")
    for axis, label in zip(axes, ("perplexity, change in %", "names retrieved, %"), strict=True):
        axis.set_xlabel("bytes held, % of the full cache")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    what = f"{result['contexts']} contexts of {result['context_tokens']} tokens, {result['dtype']}"
    figure.suptitle(f"{what}\n{describe(result['environment'])}", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_times(path: str, result: dict[str, Any]) -> None:
    """Grouped bars: time per further token and time to the first token, by point and variant."""
    pyplot = require_pyplot()
    rows = result["rows"]
    points = list(dict.fromkeys(f"{row['batch']}x{row['prompt_length']}" for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    times = {(f"{row['batch']}x{row['prompt_length']}", row["variant"]): row for row in rows}
    figure, axes = pyplot.subplots(1, 2, figsize=(6 + 1.2 * len(points), 4.5), layout="constrained")
    for axis, key, label in zip(
        axes, ("itl_ms", "ttft_ms"), ("ms per further token", "ms to the first token"), strict=True
    ):
        width = 0.8 / len(variants)
        for i, variant in enumerate(variants):
            heights = [times[point, variant][key] or 0.0 if (point, variant) in times else 0.0 for point in points]
            places = [j + (i - (len(variants) - 1) / 2) * width for j in range(len(points))]
            bars = axis.bar(places, heights, width, label=variant)
            axis.bar_label(bars, [number(h) if h else "" for h in heights], fontsize=7, rotation=90, padding=2)
        axis.set_xticks(range(len(points)), points)
        axis.set_xlabel("batch x prompt")
        axis.set_ylabel(label)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    what = f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['new_tokens']} new tokens"
    figure.suptitle(f"{what}\n{describe(result['environment'])}", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_gating_png(path: str, result: dict[str, Any]) -> None:
    """Perplexity above stock's against mean experts, a line per rule."""
    pyplot = require_pyplot()
    figure, axis = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    rules = list(dict.fromkeys(row["rule"] for row in result["rows"] if row["rule"] != "stock"))
    stock = next(row for row in result["rows"] if row["rule"] == "stock")
    for rule in rules:
        rows = [stock, *(row for row in result["rows"] if row["rule"] == rule)]
        rows = sorted((row for row in rows if row["experts"] > 1), key=lambda row: row["experts"])
        axis.plot([row["experts"] for row in rows], [row["loss_percent"] for row in rows], marker="o", label=rule)
    unchanged = [
        row["loss_percent"] for row in result["rows"] if "renormalised" not in row["rule"] and row["experts"] > 1
    ]
    axis.set_ylim(top=1.2 * max(unchanged))  # renormalised is off the picture soon
    axis.set_xlabel("mean experts a token")
    axis.set_ylabel("perplexity above stock, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    axis.set_title(f"{result['model']}, {result['scored_tokens']:,} tokens", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
