"""Tables of the docs against the files of docs/bench they name: every number as `bench.tables.number` writes it."""

import json
import random
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
    for name in ("h200-v2-lite-adaptive", "h200-v2-lite-adaptive-int4", "h200-v2-lite-adaptive-2"):
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
    a, b, c = shares.values()
    assert f"{a[0]} and {a[1]} % at batch 1, {a[2]} and {a[3]} % at batch 8, {a[4]} and {a[5]} % at batch 32" in text
    assert f"in a second run {b[0]} and {b[1]}, {b[2]} and {b[3]}, {b[4]} and {b[5]} %" in text
    assert f"in a fourth, commit 4c071ec, {c[0]} and {c[1]}, {c[2]} and {c[3]}, {c[4]} and {c[5]} %" in text


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
        "h200-v2-lite-adaptive-2": "V2-Lite, {}",
        "h200-llm-7b-int4": "LLM-7B, {}",
        "h200-llm-7b-int4-all-before": "LLM-7B, {}, all packed, 4c071ec",
        "h200-llm-7b-int4-all": "LLM-7B, {}, all packed, 9817881",
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
    assert len(done) == 12


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


GUESSES = {"h200-speculation-v2-lite": "V2-Lite", "h200-speculation-v3-4layer": "V3, 4 layers"}


def words_of(page):
    return " ".join((DOCS / page).read_text("utf-8").split())


def by_steps(row):
    return row["tokens_per_step"] * row["plain_ms"] / row["check_ms"]


def test_guesses_on_a_gpu():
    listed = 0
    for file, model in GUESSES.items():
        rows = rows_of(file)
        for point, drafts in dict.fromkeys((row["point"], row["drafts"]) for row in rows):
            pair = rows_of(file, point=point, drafts=drafts)
            assert [row["forced"] for row in pair] == [0.62, 0.72] and pair[0]["plain_ms"] == pair[1]["plain_ms"]
            (cells,) = (c for c in table_cells("speculative.md", f"{model}, {point}") if c[1] == str(drafts))
            expected = [number(pair[0]["plain_ms"])]
            expected.append(", ".join(number(row["check_ms"]) for row in pair))
            expected.append(", ".join(ratio(row["check_ms"] / row["plain_ms"]) for row in pair))
            expected.append(", ".join(number(row["tokens_per_step"]) for row in pair))
            expected.append(", ".join(ratio(by_steps(row)) for row in pair) if point.startswith("1x") else "")
            expected.append(", ".join(ratio(row["speed_up"]) for row in pair))
            assert cells[2:] == expected, (model, point, drafts)
            listed += 1
    lines = [line for line in (DOCS / "speculative.md").read_text("utf-8").splitlines() if line.startswith("| V")]
    assert len(lines) == listed == 15


def steps_of_calls(row, new_tokens, calls):
    """What `bench speculation` drew again: the steps of each call, and the tokens a step and row of all of them."""
    draw, steps, row_steps = random.Random(1), [], 0
    for _ in range(calls):
        left = [new_tokens - 1] * int(row["point"].partition("x")[0])
        steps.append(0)
        while any(left):
            steps[-1] += 1
            for r, tokens in enumerate(left):
                if tokens:
                    hits = [draw.random() < row["forced"] for _ in range(min(row["drafts"], tokens - 1))]
                    left[r] -= 1 + (hits.index(False) if False in hits else len(hits))
                    row_steps += 1
    return steps, calls * (new_tokens - 1) * len(left) / row_steps


def test_luck_of_the_guesses():
    rows = [(row, 64, 2) for row in rows_of("h200-speculation-v2-lite")]
    rows += [(row, 128, 1) for row in rows_of("h200-speculation-v3-4layer")]
    timed = {}
    for row, new_tokens, warm in rows:
        steps, per_step = steps_of_calls(row, new_tokens, warm + 3)
        assert per_step == pytest.approx(row["tokens_per_step"], rel=1e-12), row
        timed.setdefault((row["point"], row["drafts"], row["forced"]), steps[warm:])  # V2-Lite's come first
    text = words_of("speculative.md")
    a, b, c = timed["1x1024", 3, 0.72]
    assert f"with three guesses at 0.72 the timed calls took {a}, {b} and {c} steps for 63 tokens" in text
    (row,) = rows_of("h200-speculation-v2-lite", point="1x1024", drafts=3, forced=0.72)
    lucky, mean = number(63 / min(a, b, c), 2), number(row["tokens_per_step"])
    assert f"So {row['speed_up']:.2f} is a call of {lucky} tokens a step; all calls have {mean} in the mean" in text
    assert f"which makes {by_steps(row):.2f}." in text
    a, b, c = timed["1x1024", 7, 0.72]
    assert f"With seven guesses at 0.72 they took {a}, {b} and {c}." in text
    eight, many = (
        " and ".join(", ".join(map(str, timed[point, 3, 0.72])).rsplit(", ", 1)) for point in ("8x1024", "32x1024")
    )
    assert f"With three at 0.72, 8 rows took {eight} steps, and 32 rows {many}." in text


def test_what_guesses_reach():
    text = words_of("speculative.md")
    low, high = rows_of("h200-speculation-v2-lite", point="1x1024", drafts=3)
    steps = " and ".join(f"{by_steps(row):.2f}" for row in (low, high))
    gains = [
        " and ".join(f"{row['speed_up']:.2f}" for row in rows_of("h200-speculation-v2-lite", point=point, drafts=3))
        for point in ("1x1024", "8x1024", "32x1024")
    ]
    assert f"with {gains[0]}, by steps {steps}. 8 rows have {gains[1]}. 32 rows have {gains[2]}," in text
    assert max(by_steps(row) for row in rows_of("h200-speculation-v2-lite", point="1x1024")) == by_steps(high)
    lost = {(r["point"], r["drafts"]): r["speed_up"] for r in rows_of("h200-speculation-v2-lite") if r["speed_up"] < 1}
    assert list(lost) == [("1x1024", 7), ("8x1024", 1)]
    seven, one = (f"{gain:.2f}" for gain in lost.values())
    assert f"seven guesses lose at batch 1 ({seven}), and one guess loses with 8 rows ({one})" in text
    v3 = rows_of("h200-speculation-v3-4layer")
    assert f"V3's four layers have {max(row['speed_up'] for row in v3):.2f} at best" in text
    assert all(row["speed_up"] < 1 for row in v3 if row["forced"] == 0.62)

    bytes_ms = {}
    for tokens in (1, 2, 4, 8):
        (cells,) = (c for c in table_cells("speculative.md", tokens) if len(c) == 6)
        bytes_ms[tokens] = float(cells[2])
        assert cells[1] == f"{64 * (1 - (1 - 6 / 64) ** tokens):.1f}"
        assert float(cells[3]) == pytest.approx(bytes_ms[tokens] / bytes_ms[1], abs=0.01)
        for cell, a in zip(cells[4:], (0.62, 0.72), strict=True):
            assert float(cell) == pytest.approx((1 - a**tokens) / (1 - a) / float(cells[3]), abs=0.01)
    slower = [low["plain_ms"] / bytes_ms[1], low["check_ms"] / bytes_ms[4]]
    a, b = (f"{value:.1f}" for value in slower)
    assert f"A plain step takes {a} times what its bytes take, a check of four tokens {b} times." in text
    high_ms, low_ms = (low["plain_ms"] * (1 - a**4) / (1 - a) / 1.6 for a in (0.72, 0.62))
    need = f"{high_ms:.1f} ms at 0.72 and {low_ms:.1f} ms at 0.62, {high_ms / bytes_ms[4]:.1f} and"
    assert f"would have to take {need} {low_ms / bytes_ms[4]:.2f} times its bytes; it takes 4.0." in text
    eight, many = (rows_of("h200-speculation-v2-lite", point=f"{n}x1024", drafts=3) for n in (8, 32))
    a, b = (f"{sum(row['check_ms'] / row['plain_ms'] for row in pair) / 2:.1f}" for pair in (eight, many))
    assert f"Four tokens a row take {a} and {b} times as long as one there." in text


def test_deepseek_moe():
    rows = {row["variant"]: row for row in rows_of("h200-deepseek-moe-16b")}
    whole, packed = rows["all"], rows["int4"]
    for variant, row in rows.items():
        found = table_cells("adaptive_topk.md", {"all": "without the pass"}.get(variant, variant))
        (cells,) = (cells for cells in found if len(cells) == 9)
        expected = [number(row[key]) for key in ("ttft_ms", "experts_per_step", "itl_ms")]
        expected += [ratio(whole["itl_ms"] / row["itl_ms"]), number(row["tokens_per_second"]), number(row["floor_ms"])]
        expected += [f"{row['floor_ratio']:.2f}", f"{row['weight_bytes'] / 1e9:.2f}"]
        assert cells[1:] == expected, variant
    assert len(rows) == 8
    text = words_of("adaptive_topk.md")
    a, b, c = (
        f"{100 * (whole['itl_ms'] - row['itl_ms']) / (whole['floor_ms'] - row['floor_ms']):.0f} %"
        for row in (rows["target 0.75"], rows["top2"], rows["top1"])
    )
    assert f"target 0.75 gives {a}, `top2` {b} and `top1` {c}." in text
    four_bits = [row for variant, row in rows.items() if variant.startswith("int4")]
    low, high = (f"{pick(row['floor_ratio'] for row in four_bits):.1f}" for pick in (min, max))
    assert f"In four bits a step takes {low} to {high} times its bytes" in text
    times = [row["itl_ms"] for row in four_bits if row is not packed]
    assert f"within {100 * (max(times) / min(times) - 1):.0f} % of each other" in text
    a, b, c, d = (number(row["ttft_ms"]) for row in four_bits)
    two = f"{a} and {b} ms in two of the packed variants"
    assert f"the first token takes {two} and {c} and {d} in the other two was not looked into" in text
    accuracy = whole["accuracy"]
    assert f"within {accuracy['error']:.3f} of stock's, whose own noise is {accuracy['noise']:.3f}." in text
