"""What the report page shows of each kind of result: a heading, tables and pictures.

Files are of any version and may be of runs that stopped: a value that is not there is a dash, and a kind that is not
known gets a table of whatever its rows hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .charts import Line, dots, lines
from .report_cells import (
    Column,
    Row,
    Section,
    checked,
    drawn,
    gibibytes_of,
    megabytes_of,
    number_of,
    plain,
    ratio_of,
    table_of,
    text_of,
)
from .tables import ratio


def section(result: dict[str, Any]) -> Section:
    """The section of a result, by its kind."""
    kind = kind_of(result)
    found = SECTIONS.get(kind, _unknown)(result)
    return found if result.get("complete", True) else Section(
        found.heading, ["This run was stopped: what is below is what it had measured.", *found.remarks],
        found.charts, found.tables,
    )  # fmt: skip


def kind_of(result: dict[str, Any]) -> str:
    """The bench that wrote it: as it says, by its command, or by its rows; "" if none is known."""
    if result.get("bench") in SECTIONS:
        return str(result["bench"])
    command = [str(word) for word in result.get("command") or ()]
    if len(command) > 2 and command[1] == "bench" and command[2] in SECTIONS:
        return command[2]
    first = result["rows"][0] if result["rows"] else {}
    signs = {"generate": "prompt_length", "cache": "context", "gating": "rule", "speculation": "forced", "ops": "op"}
    signs |= {"auto": "left_alone", "drafts": "draft", "tokenizing": "tokenise_ms"}
    return next((kind for kind, sign in signs.items() if sign in first), "")


def _model(result: dict[str, Any]) -> str:
    first = result["rows"][0] if result["rows"] else {}
    return str(result.get("model") or first.get("model") or "-")


def _generate(result: dict[str, Any]) -> Section:
    rows = result["rows"]
    first: Row = rows[0] if rows else {}

    def point(row: Row) -> str:
        return f"{row.get('batch')}x{row.get('prompt_length')}"

    columns: list[Column] = [
        ("batch x prompt", point), ("variant", text_of("variant")),
        ("TTFT ms", number_of("ttft_ms")), ("faster", ratio_of("ttft_ratio")),
        ("ITL ms", number_of("itl_ms")), ("faster", ratio_of("itl_ratio")),
        ("tokens/s", number_of("tokens_per_second")),
        ("peak GiB above weights", gibibytes_of("peak_bytes_above_weights")),
        ("KV bytes a token and layer", number_of("kv_bytes_per_token_and_layer")),
        ("x floor", ratio_of("floor_ratio")),
        ("checked", checked),
    ]  # fmt: skip
    times = [
        dots(title, [(point(row), str(row.get("variant")), row.get(key)) for row in rows], "ms")
        for key, title in (("itl_ms", "Time per further token"), ("ttft_ms", "Time to the first token"))
    ]
    remarks = [
        "TTFT: time to the first token. ITL: time per further token. Faster: stock's time divided by the row's. Floor: "
        "the bytes a step must read, at the measured copy speed."
    ]
    if (copy := result["environment"].get("copy_bytes_per_second")) is not None:
        remarks.append(f"Copy speed: {copy / 1e9:,.0f} GB/s.")
    heading = (
        f"Whole models: {_model(result)}, {plain(first.get('dtype'))}, {plain(first.get('new_tokens'))} new tokens"
    )
    soak = result.get("soak")
    extra = [table_of("Many calls of mixed size", [soak], [(k, text_of(k)) for k in soak])] if soak else []
    return Section(heading, remarks, drawn(*times), [table_of("Times by point and variant", rows, columns), *extra])


def _cache(result: dict[str, Any]) -> Section:
    rows = result["rows"]

    def point(row: Row) -> str:
        return f"{row.get('batch')}x{row.get('context')}"

    columns: list[Column] = [
        ("batch x context", point), ("cache", text_of("variant")), ("TTFT ms", number_of("ttft_ms")),
        ("second prompt ms", number_of("second_ttft_ms")), ("ITL ms", number_of("itl_ms")),
        ("tokens/s", number_of("tokens_per_second")), ("MB held", megabytes_of("bytes_held")),
        ("peak MB above weights", megabytes_of("peak_bytes_above_weights")), ("checked", checked),
    ]  # fmt: skip
    held = [(point(r), str(r.get("variant")), r.get("bytes_held") and r["bytes_held"] / 2**20) for r in rows]
    step = [(point(r), str(r.get("variant")), r.get("itl_ms")) for r in rows]
    charts = drawn(dots("Memory the cache holds", held, "MiB"), dots("Time per further token", step, "ms"))
    return Section(f"Kinds of cache: {_model(result)}", [], charts, [table_of("By context and cache", rows, columns)])


def _quality(result: dict[str, Any]) -> Section:
    rows = result["rows"]
    full = (rows[0].get("bytes_held") if rows else None) or 0
    columns: list[Column] = [
        ("policy", text_of("policy")), ("budget %", number_of("percent")), ("perplexity", number_of("perplexity")),
        ("change %", lambda r: "-" if r.get("change_percent") is None else f"{r['change_percent']:+.2f}"),
        ("same token %", number_of("agreement_percent")),
        ("retrieved", lambda r: "-" if r.get("questions") is None else f"{r['retrieved']} of {r['questions']}"),
        ("bytes to full", lambda r: ratio(r["bytes_held"] / full) if full and r.get("bytes_held") else "-"),
        ("checked", checked),
    ]  # fmt: skip
    ok = [row for row in rows if row.get("status", "ok") == "ok" and row.get("bytes_held") and full]
    series = {}
    for policy in dict.fromkeys(row["policy"] for row in ok[1:]):
        own = [ok[0], *(row for row in ok[1:] if row["policy"] == policy)]
        series[policy] = [(100 * row["bytes_held"] / full, row.get("change_percent")) for row in own]
    chart = lines(
        "Perplexity against memory", [Line(str(name), points) for name, points in series.items()],
        "bytes held, % of the full cache", "perplexity, change in %",
    )  # fmt: skip
    what = f"{result.get('contexts')} contexts of {result.get('context_tokens')} tokens"
    heading = f"Quality of caches that evict: {_model(result)}, {result.get('dtype')}"
    return Section(heading, [f"Scored on {what}."], drawn(chart), [table_of("By policy and budget", rows, columns)])


def _gating(result: dict[str, Any]) -> Section:
    rows = result["rows"]
    columns: list[Column] = [
        ("rule", text_of("rule")), ("target", number_of("target")), ("experts a token", number_of("experts")),
        ("perplexity", lambda r: plain(r.get("perplexity"))),
        ("more than stock %", lambda r: "-" if r.get("loss_percent") is None else f"{r['loss_percent']:+.2f}"),
    ]  # fmt: skip
    stock = [row for row in rows if row.get("rule") == "stock"]
    series = []
    for rule in dict.fromkeys(row.get("rule") for row in rows if row.get("rule") != "stock"):
        own = sorted((r for r in (*stock, *(r for r in rows if r.get("rule") == rule)) if r.get("experts")),
                     key=lambda r: r["experts"])  # fmt: skip
        series.append(Line(str(rule), [(r["experts"], r.get("loss_percent")) for r in own if r["experts"] > 1]))
    chart = lines("What leaving out experts costs", series, "mean experts a token", "perplexity above stock, %")
    heading = f"Fewer experts a token: {_model(result)}"
    return Section(heading, [], drawn(chart), [table_of("By rule and target", rows, columns)])


def _speculation(result: dict[str, Any]) -> Section:
    rows = result["rows"]
    columns: list[Column] = [
        ("batch x prompt", text_of("point")), ("drafts", text_of("drafts")), ("forced acceptance", number_of("forced")),
        ("plain step ms", number_of("plain_ms")), ("check ms", number_of("check_ms")),
        ("tokens a step", number_of("tokens_per_step")), ("speed-up", ratio_of("speed_up")),
    ]  # fmt: skip
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for row in rows:
        name = f"{row.get('point')}, acceptance {row.get('forced')}"
        groups.setdefault(name, []).append((row["drafts"], row.get("speed_up")))
    chart = lines(
        "Gain at a forced acceptance", [Line(name, places) for name, places in groups.items()], "drafts a step",
        "plain time divided by ours",
    )  # fmt: skip
    remarks = ["Guesses cost nothing and come true by a draw: the times are real, the text is not."]
    heading = f"Speculative decoding: {_model(result)}"
    return Section(heading, remarks, drawn(chart), [table_of("By point, drafts and acceptance", rows, columns)])


def _drafts(result: dict[str, Any]) -> Section:
    columns: list[Column] = [
        ("draft", text_of("draft")), ("parameters", text_of("parameters")), ("a guess ms", number_of("guess_ms")),
        ("acceptance", number_of("acceptance")), ("accepted of 4", number_of("accepted_per_step")),
        ("best number", text_of("best_drafts")), ("predicted", ratio_of("predicted_speed_up")), ("remarks", checked),
    ]  # fmt: skip
    heading = f"Drafts for {plain(result.get('target'))}"
    return Section(heading, [], [], [table_of("By draft, best first", result["rows"], columns)])


def _auto(result: dict[str, Any]) -> Section:
    columns: list[Column] = [
        ("draft", text_of("draft")), ("text", text_of("text")), ("plain call ms", number_of("plain_ms")),
        ("with auto ms", number_of("auto_ms")), ("speed-up", ratio_of("speed_up")),
        ("calls left to plain decoding", text_of("left_alone")), ("same tokens", text_of("equal")),
        ("remarks", checked),
    ]  # fmt: skip
    rows = result["rows"]
    chart = dots(
        "Speed-up of whole calls", [(str(r.get("draft")), str(r.get("text")), r.get("speed_up")) for r in rows], "x"
    )
    what = f"{plain(result.get('calls'))} calls of {plain(result.get('new_tokens'))} tokens each, in turns"
    heading = f"Speculation as it sees fit: {plain(result.get('target'))}, {what}"
    return Section(heading, [], drawn(chart), [table_of("By draft and text", rows, columns)])


def _tokenizing(result: dict[str, Any]) -> Section:
    columns: list[Column] = [
        ("consumer", text_of("consumer")), ("step ms", number_of("step_ms")), ("tokenise ms", number_of("tokenise_ms")),
        ("in line, requests/s", number_of("inline_requests_per_second")),
        ("ring, requests/s", number_of("ring_requests_per_second")), ("gain", ratio_of("ratio")),
        ("gain if all overlapped", ratio_of("overlap")), ("checked", checked),
    ]  # fmt: skip
    return Section("Tokenising beside steps", [], [], [table_of("By consumer and step", result["rows"], columns)])


def _ops(result: dict[str, Any]) -> Section:
    columns: list[Column] = [
        ("op", text_of("op")), ("shape", text_of("shape")), ("us", number_of("microseconds")),
        ("GB/s", number_of("gigabytes_per_second")), ("TFLOP/s", number_of("teraflops_per_second")),
        ("% of copy", number_of("percent_of_copy")),
        ("to reference", ratio_of("reference_ratio")), ("checked", checked),
    ]  # fmt: skip
    return Section("Single ops", [], [], [table_of("By op and shape", result["rows"], columns)])


def _unknown(result: dict[str, Any]) -> Section:
    rows = [row if isinstance(row, dict) else {"value": row} for row in result["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: list[Column] = [(str(name), text_of(name)) for name in names]
    heading = f"Other results: {result.get('bench') or 'kind not known'}"
    return Section(heading, [], [], [table_of("All rows", rows, columns)] if names else [])


def _stress(result: dict[str, Any]) -> Section:
    from .report_stress import stress_section

    return stress_section(result)


SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "generate": _generate,
    "cache": _cache,
    "quality": _quality,
    "gating": _gating,
    "speculation": _speculation,
    "drafts": _drafts,
    "auto": _auto,
    "tokenizing": _tokenizing,
    "stress": _stress,
    "ops": _ops,
}
