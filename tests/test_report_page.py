"""The report page: every kind of result is shown, nothing is loaded from elsewhere, and a real browser reads it."""

import html.parser
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_accel import AccelError, cli
from deepseek_accel.bench import charts, latency_fit, report_cells, report_page, report_sections

FILES = sorted((Path(__file__).parent.parent / "docs" / "bench").glob("*.json"))
ENVIRONMENT = {
    "device": "cpu",
    "hardware": "a machine",
    "torch": "2",
    "triton": "3",
    "transformers": "5",
    "commit": "abc123",
}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "br"}
EVIL = "<script>alert('x')</script>&\"'"


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, the text, and that every tag is closed where it must be."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def stress(opened=False, windows=(None,)):
    def row(load, window):
        times = {key: 10.0 * load + i for i, key in enumerate(("p50", "p95", "p99", "mean", "variance"))}
        return dict(
            load="open" if opened else "closed", users=None if opened else load, rate=float(load) if opened else None,
            window_ms=window, requests=8, answered=8, errors=0, status="ok", detail="3/3 as generate", seconds=1.0,
            new_tokens_per_second=100.0 * load, total_tokens_per_second=900.0 * load, requests_per_second=load,
            ttft_ms=times, itl_ms=times, e2e_ms=times, preemptions=0, decoding_rows=1.0,
            peak_bytes_above_weights=None, stock_tokens_per_second=None if opened else 50.0,
            stock_ratio=None if opened else 2.0 * load, e2e_each_ms=[10.0 * load + 50.0] * 8,
        )  # fmt: skip

    loads = [1, 2, 4, 8, 16]
    kind = "open" if opened else "closed"
    samples = [[50 + 0.5 * n**2 + 0.1 * i for i in range(20)] for n in loads]
    fits = [{"window_ms": None} | latency_fit.study(kind, loads, samples, p) for p in (50.0, 99.0)]
    return {
        "bench": "stress", "environment": ENVIRONMENT, "model": "tiny", "dtype": "float32", "load": kind,
        "mix": {"kind": "fixed", "prompt_tokens": 64, "new_tokens": 16},
        "rows": [row(n, w) for n in loads for w in windows], "fits": fits if len(windows) == 1 else [],
        "stock": [] if opened else [dict(users=1, batch=1, status="ok", detail="scaled", tokens_per_second=50.0)],
        "split": [dict(prompt_tokens=64, new_tokens=8, prefill_ms=3.0, decode_ms_per_token=1.0)],
        "breakdown": dict(prompt_tokens=1000, tokenizer="bundled", tokenise_ms=1.0, queue_ms=2.0, total_ms=9.0),
    }  # fmt: skip


def speculation():
    rows = [
        dict(point="1x1024", drafts=d, forced=a, plain_ms=2.0, check_ms=2.5, tokens_per_step=1 + a * d, speed_up=1.2)
        for d in (1, 3) for a in (0.6, 0.7)
    ]  # fmt: skip
    return {"environment": ENVIRONMENT, "model": "tiny", "rows": rows, "complete": False}


def everything():
    found = [(str(path), report_page.read(str(path))) for path in FILES]
    found += [("closed.json", stress()), ("open.json", stress(opened=True))]
    found += [("window.json", stress(opened=True, windows=(0.0, 50.0, 100.0))), ("spec.json", speculation())]
    return [*found, ("other.json", {"environment": ENVIRONMENT, "rows": [{"colour": "red", "size": [1, 2]}, {"n": 7}]})]


def test_everything_is_on_the_page():
    results = everything()
    assert len(FILES) >= 7
    text = report_page.page(results, "A title & more")
    page = Reader(text)
    assert page.all("html")[0]["lang"] == "en" and "A title & more" in page.text
    assert len(page.all("section")) == len(results)
    for name, result in results:
        assert Path(name).name in page.text and result["environment"]["commit"] in page.text
    for words in (
        "Whole models: v2-lite",
        "Kinds of cache",
        "Quality of caches",
        "Fewer experts",
        "Speculative",
        "Drafts for tiny",
    ):
        assert words in page.text
    assert "Under load (closed loop): tiny, float32" in page.text and "Under load (open loop)" in page.text
    stopped = sum(not result.get("complete", True) for _, result in results)
    assert page.text.count("This run was stopped") == stopped >= 1
    assert "Other results: kind not known" in page.text and "[1, 2]" in page.text
    assert "10.0 / 11.0 / 12.0" in page.text and "users, 95 % within" in page.text
    row = next(r for r in json.loads(FILES[-1].read_text())["rows"])
    assert report_cells.number_of("itl_ms")(row) in page.text


def test_nothing_comes_from_elsewhere():
    text = report_page.page(everything(), "t")
    page = Reader(text)
    assert not {"script", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert not [word for word in ("http:", "https:", "@import", "url(", "//") if word in text.replace("/ /", "")]
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_it_can_be_read_without_seeing_it():
    page = Reader(report_page.page(everything(), "t"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("aria-labelledby",):
            assert set((attributes.get(name) or ids[0]).split()) <= set(ids)
    pictures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(pictures) == len(page.all("figure")) >= 15
    assert len(page.all("title")) == 1 + len(pictures) == 1 + len(page.all("desc"))
    assert all(a.get("aria-hidden") == "true" for a in page.all("svg") if a.get("role") != "img")
    assert len(page.all("caption")) == len(page.all("table")) and len(page.all("h1")) == 1
    assert {a.get("scope") for a in page.all("th")} == {"col", "row"}
    assert all(a.get("tabindex") == "0" for a in page.all("div") if a.get("class") == "scroll")


def test_what_files_say_is_text_not_markup():
    evil = {"environment": {EVIL: EVIL}, "command": ["x", EVIL], "bench": EVIL, "rows": [{EVIL: EVIL}, {"a": EVIL}]}
    generated = {"environment": {}, "rows": [dict(model=EVIL, batch=1, prompt_length=1, variant=EVIL, itl_ms=2.0)]}
    text = report_page.page([(EVIL, evil), ("g", generated)], EVIL)
    page = Reader(text)
    assert "<script" not in text and not page.all("script")
    assert page.text.count(EVIL) >= 8


def test_kinds():
    kind = report_sections.kind_of
    assert kind({"rows": [], "command": ["deepseek-accel", "bench", "cache"]}) == "cache"
    assert kind({"rows": [{"prompt_length": 1}]}) == "generate" and kind({"rows": [{"forced": 1}]}) == "speculation"
    for file in FILES:  # every file of ours is of a kind that is known, but for the loads of a checkpoint
        found = kind(report_page.read(str(file)))
        assert found or file.stem.startswith("cpu-host"), file
        assert (found == "auto") == file.stem.endswith("-auto")
    assert kind({"rows": []}) == kind({"rows": [{"x": 1}], "bench": "new"}) == ""
    for name in report_sections.SECTIONS:
        if name != "stress":  # written with its environment and mix from the first row on
            empty = report_sections.section({"bench": name, "environment": ENVIRONMENT, "rows": []})
            assert empty.heading and not empty.charts


def test_columns_without_anything_are_left_out():
    columns = [("a", report_cells.text_of("a")), ("b", report_cells.text_of("b")), ("c", report_cells.text_of("c"))]
    table = report_cells.table_of("t", [{"c": 1}, {"a": 2}], columns)
    assert table.columns == ["a", "c"] and table.rows == [["-", "1"], ["2", "-"]]


def test_files_that_are_no_results(tmp_path, capsys):
    for text, says in (("{", "as JSON"), ("[]", "rows"), ('{"rows": []}', "environment"), (None, "cannot read")):
        file = tmp_path / "x.json"
        file.unlink(missing_ok=True) if text is None else file.write_text(text)
        with pytest.raises(AccelError, match=says):
            report_page.read(str(file))
    file.write_text('{"environment": {}, "bench": "quality", "rows": [{"policy": "full", "bytes_held": "many"}]}')
    out = str(tmp_path / "out.html")
    assert cli.main(["bench", "report", str(file), "--html", out]) == 2
    assert "x.json' cannot be shown" in capsys.readouterr().err and not Path(out).exists()
    file.write_text('{"environment": {}, "bench": "generate", "rows": [{"itl_ms": Infinity}]}')
    assert cli.main(["bench", "report", str(file), "--html", out]) == 2
    assert cli.main(["bench", "report", str(FILES[0]), "--html", str(tmp_path / "no" / "x.html")]) == 2


# Pictures


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
@settings(max_examples=200, deadline=None)
def test_linear_ticks_are_few_round_and_inside(low, width):
    ticks = charts.linear_ticks(low, low + width)
    assert 1 <= len(ticks) <= 12 and ticks == sorted(set(ticks))
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in ticks)


@given(st.floats(1e-4, 1e6), st.floats(1.3, 1e6))
@settings(max_examples=200, deadline=None)
def test_log_ticks_are_inside(low, factor):
    ticks = charts.log_ticks(low, low * factor)
    assert 1 <= len(ticks) <= 12 and ticks == sorted(ticks)
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)


def test_places_on_a_picture():
    scale = charts.Scale(1, 100, 0, 200, log=True)
    assert [scale(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert charts.Scale(5, 5, 0, 10, log=False)(5) == 5
    line = charts.Line("a", [(1, 1.0), (2, None), (3, math.nan), (4, 4.0)])
    chart = charts.lines("t", [line, charts.Line("none", [(1, None)])], "x", "y", x_log=True)
    assert [name for _, name in chart.key] == ["a"] and chart.svg.count("<circle") == 2
    assert "y against x. a: 1.00 at 1, 4.00 at 4." in chart.svg
    assert charts.lines("t", [charts.Line("a", [(0, 0.0)])], "x", "y", y_log=True) is None
    rows = [("g", "stock", 10.0), ("g", "all", 1.0), ("g", "none", None)]
    dots = charts.dots("t", rows, "ms")
    assert dots.svg.count("<circle") == dots.svg.count("<polygon") == 1 and "g, all: 1.00" in dots.svg
    assert charts.dots("t", rows[2:], "ms") is None
    marks = {charts.mark(0, 0, i) for i in range(28)}
    assert len(marks) == 28, "no two series look alike"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the other tests parse the page")
def test_a_real_browser_shows_it(tmp_path):
    file = tmp_path / "page.html"
    names = []
    for i, (_, result) in enumerate(reversed(everything())):  # pictures first
        names.append(str(tmp_path / f"{i}.json"))
        Path(names[-1]).write_text(json.dumps(result))
    assert cli.main(["bench", "report", *names, "--html", str(file), "--title", "All of it"]) == 0
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += f"--disable-component-update --disable-sync --hide-scrollbars --user-data-dir={tmp_path}/profile"

    def chromium(*more):
        command = [BROWSER, *flags.split(), *more, file.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout

    source, seen = Reader(file.read_text()), Reader(chromium("--dump-dom"))
    assert [tag for tag, _ in seen.tags if tag != "tbody"] == [tag for tag, _ in source.tags if tag != "tbody"]
    assert seen.text == source.text and "All of it" in seen.text
    from PIL import Image

    for width in (390, 1200):
        picture = tmp_path / f"{width}.png"
        chromium(f"--screenshot={picture}", f"--window-size={max(width, 500)},2000")
        with Image.open(picture) as image:
            colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert {(0, 0x72, 0xB2), (0xC4, 0x4E, 0), (0xFF, 0xFF, 0xFF)} <= colours, "series are drawn in their colours"
