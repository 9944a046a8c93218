"""What `bench stress` prints."""

from __future__ import annotations

from typing import Any

from .environment import describe
from .latency_fit import LEAST_LOADS
from .tables import number, ratio, table

PERCENTILES = ("p50", "p95", "p99")


def stress_table(result: dict[str, Any]) -> Any:
    """One row per point; times in milliseconds, "a/b/c" are P50, P95 and P99."""
    opened = result["load"] == "open"
    columns = ["req/s asked", "window"] if opened else ["users", "requests"]
    columns += ["new tok/s", "all tok/s", "req/s", "TTFT ms 50/95/99", "ITL ms 50/95/99", "e2e ms 50/95/99"]
    columns += [*(["e2e mean", "std"] if opened else []), "rows", "peak GiB", "preempted", "errors"]
    columns += [*([] if opened else ["to stock"]), "checked"]
    rows = []
    for row in result["rows"]:
        cells = [number(row["rate"]), f"{row['window_ms']:g}"] if opened else [str(row["users"]), str(row["requests"])]
        for name in ("new_tokens_per_second", "total_tokens_per_second", "requests_per_second"):
            cells.append(number(row[name]))
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            cells.append("-" if row[name] is None else "/".join(number(row[name][key]) for key in PERCENTILES))
        e2e = row["e2e_ms"] or {}
        cells += [number(e2e.get("mean")), number(e2e["variance"] ** 0.5 if e2e else None)] if opened else []
        peak = row["peak_bytes_above_weights"]
        cells += [
            number(row["decoding_rows"]),
            "n/a" if peak is None else f"{peak / 2**30:.2f}",
            str(row["preemptions"]),
            str(row["errors"]),
            *([] if opened else [ratio(row["stock_ratio"])]),
            row["detail"] if row["status"] == "ok" else f"{row['status']}: {row['detail']}",
        ]
        rows.append(cells)
    return table(heading(result), columns, rows)


def heading(result: dict[str, Any]) -> str:
    mix = result["mix"]
    if mix["kind"] == "fixed":
        lengths = f"{mix['prompt_tokens']:,} prompt and {mix['new_tokens']:,} new tokens each"
    else:
        lengths = f"chat lengths, means {mix['prompt']['mean']:g} prompt and {mix['answer']['mean']:g} new tokens"
    what = f"model {result['model']}, {result['dtype']}, load {result['load']}, {lengths}"
    return f"{describe(result['environment'])}\n{what}"


def stress_lines(result: dict[str, Any]) -> list[str]:
    """Everything but the points, a line each."""
    said = []
    for entry in result["stock"]:
        speed = f"{number(entry['tokens_per_second'])} tokens/s; " if entry["status"] == "ok" else ""
        said.append(f"stock generate, static batch of {entry['batch']}: {speed}{entry['detail']}")
    if result["rows"] and not result["fits"]:
        said.append(f"no curve of latency against load: that takes {LEAST_LOADS} different loads")
    for entry in result["fits"]:
        window = f" (window {entry['window_ms']:g} ms)" if entry.get("window_ms") else ""
        curve = f"{entry['a']:.4g} + {entry['b']:.4g} * load^{entry['c']:.3g} ms, " if "a" in entry else ""
        said.append(f"P{entry['percentile']:g} of end-to-end latency{window}: {curve}knee: {entry['knee_text']}")
    for name, whose in (("split", "engine"), ("stock_split", "stock generate")):
        for entry in result.get(name, ()):
            said.append(
                f"{whose}, one request of {entry['prompt_tokens']:,} tokens: prefill {number(entry['prefill_ms'])} ms, "
                f"decode {number(entry['decode_ms_per_token'])} ms a token"
            )
    if (parts := result.get("breakdown")) is not None:
        names = ("tokenise", "queue", "prefill", "first_token", "further_token", "total")  # first: of all before it
        times = ", ".join(f"{name.replace('_', ' ')} {number(parts[f'{name}_ms'])} ms" for name in names)
        said.append(f"one request of {parts['prompt_tokens']:,} tokens ({parts['tokenizer']} tokenizer): {times}")
    return said
