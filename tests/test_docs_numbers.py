"""Tables of the docs against the files of docs/bench they name: every number as `bench.tables.number` writes it."""

import json
from pathlib import Path

import pytest

from deepseek_accel.bench.tables import number, ratio

DOCS = Path(__file__).parents[1] / "docs"


def rows_of(name, **which):
    rows = json.loads((DOCS / f"bench/{name}.json").read_text("utf-8"))["rows"]
    return [row for row in rows if all(row[key] == value for key, value in which.items())]


def table_cells(page, first):
    """The cells of every line of a table on the page whose first cell this is."""
    lines = [line for line in (DOCS / page).read_text("utf-8").splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def three(distribution):
    return " / ".join(number(distribution[key]) for key in ("p50", "p95", "p99"))


def test_whole_models():
    second = {(r["batch"], r["prompt_length"]): r for r in rows_of("h200-v2-lite-adaptive-int4", variant="all")}
    for row in rows_of("h200-v2-lite-all"):
        other = second[row["batch"], row["prompt_length"]]
        name = f"{row['batch']}x{row['prompt_length']}"
        (cells,) = (cells for cells in table_cells("performance.md", name) if len(cells) == 9 and "," in cells[6])
        both = [f"{number(row[key])}, {number(other[key])}" for key in ("ttft_ms", "itl_ms")]
        assert [cells[3], cells[6], cells[7]] == [*both, number(row["floor_ms"])], name
        assert cells[8] == f"{row['floor_ratio']:.2f}, {other['floor_ratio']:.2f}", name


def test_fewer_experts():
    names = {"all": "without the pass", "target 0.75@8": "target 0.75, batch_budget 8"}
    found = {row["variant"] for row in rows_of("h200-v2-lite-adaptive")}
    for variant in found:
        cells = table_cells("adaptive_topk.md", names.get(variant, variant))[0]
        for cell, batch in zip(cells[1:], (1, 8, 32), strict=True):
            (row,) = rows_of("h200-v2-lite-adaptive", variant=variant, batch=batch)
            assert cell == ", ".join(number(row[key]) for key in ("experts_per_step", "itl_ms", "floor_ms")), variant


def test_shares_of_the_floor():
    text = " ".join((DOCS / "adaptive_topk.md").read_text("utf-8").split())
    shares = {}
    for name in ("h200-v2-lite-adaptive", "h200-v2-lite-adaptive-int4"):
        for batch in (1, 8, 32):
            (whole,) = rows_of(name, variant="all", batch=batch, prompt_length=1024)
            for target in ("0.75", "0.5"):
                (row,) = rows_of(name, variant=f"target {target}", batch=batch, prompt_length=1024)
                gain = (whole["itl_ms"] - row["itl_ms"]) / (whole["floor_ms"] - row["floor_ms"])
                shares.setdefault(name, []).append(f"{100 * gain:.0f}")
    (whole,) = rows_of("h200-v2-lite-adaptive-1", variant="all")
    third = []
    for target in ("0.75", "0.5"):
        (row,) = rows_of("h200-v2-lite-adaptive-1", variant=f"target {target}")
        gain = (whole["itl_ms"] - row["itl_ms"]) / (whole["floor_ms"] - row["floor_ms"])
        third.append(f"{100 * gain:.0f}")
    assert f"rule reads was loaded earlier, {third[0]} and {third[1]} %" in text
    a, b = shares.values()
    assert f"{a[0]} and {a[1]} % at batch 1, {a[2]} and {a[3]} % at batch 8, {a[4]} and {a[5]} % at batch 32" in text
    assert f"in a second run {b[0]} and {b[1]}, {b[2]} and {b[3]}, {b[4]} and {b[5]} %" in text


CACHES = {
    "full": "bf16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "reuse_prefix": "bf16, reuse_prefix",
    "window_50": "`Window`",
    "top_attention_50": "`TopAttention`",
}


def test_kinds_of_cache():
    for file in ("h200-cache", "h200-cache-long"):
        for row in rows_of(file):
            point, second = f"{row['batch']}x{row['context']}", row["second_ttft_ms"]
            if "_50" in row["variant"]:
                continue
            found = (c for c in table_cells("performance.md", point) if c[1] == CACHES[row["variant"]] and len(c) == 7)
            (cells,) = found
            held, peak = (number(row[key] / 1e6) for key in ("bytes_held", "peak_bytes_above_weights"))
            again = "" if second is None else f"{number(second)} ({second / row['ttft_ms']:.2f}x)"
            assert cells[2:] == [number(row["ttft_ms"]), again, number(row["itl_ms"]), held, peak], point


def test_eviction():
    names = CACHES | {"full": "full"}
    for file in ("h200-cache", "h200-cache-long", "h200-eviction"):
        seen = [(r["batch"], r["context"]) for r in rows_of(file) if "_50" in r["variant"]]
        for row in rows_of(file):
            where = {key: row[key] for key in ("batch", "context")}
            superseded = file == "h200-eviction" and row["batch"] > 1
            if (
                tuple(where.values()) not in seen
                or superseded
                or row["variant"] not in ("full", "window_50", "top_attention_50")
            ):
                continue
            point = f"{row['batch']}x{row['context']}"
            (cells,) = (c for c in table_cells("kv_cache.md", point) if c[1] == names[row["variant"]] and len(c) == 8)
            (full,) = rows_of(file, **where, variant="full")
            of_full = ["" if row == full else ratio(row[k] / full[k]) for k in ("itl_ms", "bytes_held")]
            held, peak = (number(row[key] / 1e6) for key in ("bytes_held", "peak_bytes_above_weights"))
            assert cells[2:] == [number(row["ttft_ms"]), number(row["itl_ms"]), of_full[0], held, of_full[1], peak], (
                point
            )


def test_packed_models():
    files = {
        "h200-v2-lite-int4": "V2-Lite, {}",
        "h200-v2-lite-adaptive-int4": "V2-Lite, {}",
        "h200-llm-7b-int4-8": "LLM-7B, {}",
        "h200-llm-7b-int4-all": "LLM-7B, {}, all packed",
    }
    done = set()
    for file, name in files.items():
        for packed in rows_of(file, variant="int4"):
            name_of_row = name.format(f"{packed['batch']}x{packed['prompt_length']}")
            if name_of_row in done:  # measured anew since
                continue
            done.add(name_of_row)
            (plain,) = rows_of(file, variant="all", **{key: packed[key] for key in ("batch", "prompt_length")})
            (cells,) = table_cells("mixed_precision.md", name_of_row)
            times = [number(row[key]) for key in ("ttft_ms", "itl_ms") for row in (plain, packed)]
            assert cells[1:] == [*times, number(packed["floor_ms"])], name_of_row
    assert len(done) == 9


def test_load_on_a_cpu():
    for row in rows_of("cpu-tiny-stress"):
        (cells,) = (c for c in table_cells("stress.md", row["users"]) if c[1] == str(row["requests"]) and len(c) == 8)
        expected = [number(row["new_tokens_per_second"]), ratio(row["stock_ratio"])]
        expected += [three(row[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")]
        assert [*cells[2:7], float(cells[7])] == [*expected, pytest.approx(row["decoding_rows"], abs=0.051)]
        assert row["detail"] == f"3/3 as generate, {row['users']}/{row['users']} as stock's"
    for row in rows_of("cpu-tiny-stress-windows"):
        (cells,) = (c for c in table_cells("stress.md", f"{row['window_ms']:g}") if len(c) == 5 and " / " in c[3])
        e2e = row["e2e_ms"]
        assert cells[1:4] == [number(e2e["mean"]), number(e2e["variance"]), three(e2e)]
        assert cells[4] == number(row["decoding_rows"])


def test_load_on_a_gpu():
    for row in rows_of("h200-stress") + rows_of("h200-stress-64", users=64):
        (cells,) = (c for c in table_cells("stress.md", row["users"]) if len(c) == 7)
        expected = [number(row["new_tokens_per_second"]), number(row["total_tokens_per_second"])]
        expected += [three(row[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")]
        assert cells[1:] == [*expected, number(row["decoding_rows"])]


def test_tokenising():
    for row in rows_of("cpu-tokenizing"):
        cells = next(c for c in table_cells("metrics.md", row["consumer"]) if float(c[1]) == round(row["step_ms"], 1))
        speeds = [number(row[f"{how}_requests_per_second"]) for how in ("inline", "ring")]
        assert cells[2:] == [f"{row['tokenise_ms']:.1f}", *speeds, ratio(row["ratio"]), ratio(row["overlap"])]


def test_auto():
    names = {"tiny-draft": "`deepseek-tiny-draft`"}
    rows = rows_of("cpu-tiny-auto")
    for draft in {row["draft"] for row in rows}:
        (cells,) = (c for c in table_cells("speculative.md", names.get(draft, f'`"{draft}"`')) if c[-1][-1] == "x")
        assert cells[1:] == [f"{row['speed_up']:.2f}x" for row in rows if row["draft"] == draft], draft
    assert all(row["equal"] for row in rows) and min(row["speed_up"] for row in rows) >= 0.97
