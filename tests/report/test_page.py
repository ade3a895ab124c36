"""The HTML page, read back as a browser and Bokeh's own reader do."""

import base64
import contextlib
import gzip
import html
import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from blends import write_corpora
from jaxgpt.config import load_config
from jaxgpt.inspect import row_text
from jaxgpt.report import __main__ as report
from jaxgpt.report.page import Plots, sections
from jaxgpt.report.serve import page_of
from jaxgpt.tracking.jsonl import json_line
from jaxgpt.tracking.run_files import RunFiles
from jobs import environment
from written_runs import (
    REWIND_STEP,
    SAMPLE,
    SPIKE_LOSS,
    SPIKE_STEP,
    short_run,
    write_long_run,
)

pytest.importorskip("bokeh")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with three runs of 20,000 steps; the first has every kind of event."""
    folder = tmp_path_factory.mktemp("runs")
    real = short_run(folder / "short" / "real")
    for i, name in enumerate(("events", "plain", "third")):
        write_long_run(folder / "long" / name, real, seed=i, with_events=name == "events")
    return folder / "long"


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.main([str(runs), "-o", str(path)])
    return path


def test_the_curves_of_a_run_have_different_dashes(runs):
    """With several runs, the color shows the run."""
    (loss, *_) = Plots([RunFiles(run, run.name) for run in runs.iterdir()]).figures
    lines = [shown for shown in loss.renderers if type(shown.glyph).__name__ == "Line"]
    for run in ("events", "plain", "third"):
        of_run = {line.name: line.glyph.line_dash for line in lines if line.name.startswith(run)}
        assert len({tuple(dash) for dash in of_run.values()}) == len(of_run) == 4


def sources(text):
    """Return the columns of each Bokeh data source in a page."""

    def decode(value):
        if isinstance(value, dict) and value.get("type") == "ndarray":
            data = gzip.decompress(base64.b64decode(value["array"]["data"]))
            return np.frombuffer(data, value["dtype"]).reshape(value["shape"])
        return value

    def walk(value):
        if isinstance(value, dict):
            if value.get("name") == "ColumnDataSource" and "attributes" in value:
                data = value["attributes"].get("data", {})
                yield {k: decode(v) for k, v in data.get("entries", [])}
            for part in value.values():
                yield from walk(part)
        elif isinstance(value, list):
            for part in value:
                yield from walk(part)

    (document,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    return list(walk(json.loads(html.unescape(document))))


def test_a_page_of_three_long_runs_is_small_and_has_all_extremes_and_events(page, runs):
    text = page.read_text()
    assert len(text.encode()) <= 2.5e6
    found = sources(text)
    assert all(len(one["y"]) <= 3000 for one in found)
    spikes = [one for one in found if SPIKE_STEP in one["steps"]]
    assert any(one["y"][list(one["steps"]).index(SPIKE_STEP)] == SPIKE_LOSS for one in spikes)
    for name in ("events", "plain", "third"):  # each smallest loss is a point of a curve
        lines = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
        losses = {r["step"]: r["loss"] for r in lines if r["kind"] == "train"}
        step = min((s for s in losses if losses[s] is not None), key=losses.get)
        y = np.float32(losses[step])
        assert any((y == one["y"][one["steps"] == step]).any() for one in found)
    marks = next(one for one in found if "kind" in one and len(one["kind"]))
    steps = list(zip(marks["kind"], marks["steps"].tolist(), strict=True))
    assert {("spike", SPIKE_STEP), ("rewind", REWIND_STEP), ("skip", 12_350)} <= set(steps)
    assert {("restart", 5_000), ("restart", 16_000), ("straggler", 15_000)} <= set(steps)
    assert {("corruption", 15_000), ("damage", 15_000)} <= set(steps)
    lines = map(json.loads, (runs / "events" / "metrics.jsonl").read_text().splitlines())
    tokens = {r["step"]: r["consumed_tokens"] for r in lines if r["kind"] == "train"}
    assert marks["tokens"][marks["steps"] == SPIKE_STEP] == tokens[SPIKE_STEP]


def test_a_page_requests_nothing_and_cannot_be_injected(page):
    text = page.read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
    assert SAMPLE not in text and html.escape(SAMPLE) in text


def test_the_text_behind_a_spike_comes_from_the_place_in_its_record(tmp_path):
    run, lines = tmp_path / "run", write_corpora(tmp_path)
    run.mkdir()
    settings = ("model.block_size=64", "data.val_share=0.05", "train.batch_size=16")
    config = load_config("tiny", *settings, "--data.blend", *lines)
    (run / "config.yaml").write_text(config.to_yaml())

    def shown(source, row=500, offset=1234):  # the batch size has changed, too
        where = {"row": row, "corpus": "name1", "offset": offset, **source}
        spike = {"kind": "spike", "step": 7, "cause": "loss", "loss": 9.0, "grad_norm": 1.0}
        (run / "metrics.jsonl").write_text(json_line({**spike, "action": "log", "rows": [where]}))
        row_text.cache_clear()
        below = sections([RunFiles(run, "run")], "title")["below"]
        (text,) = re.findall(r"spike at step 7</summary><pre>(.*?)</pre>", below, re.S)
        return html.unescape(text)

    path = tmp_path / "corpus1.bin"
    ids = [(31 * (1234 + i) + 1) % 97 for i in range(config.model.block_size + 1)]
    text = bytes(ids).decode().replace("\0", "<|endoftext|>")
    source = {"source": str(path)}
    assert shown(source) == f"row 500, name1, {path} at token 1,234:\n{text}"
    assert "row 500 cannot be read: --rows=500: must be" in shown({})  # an older record
    for place in ({"source": "/gone"}, source | {"offset": 10**6}):
        said = shown(place, row=3)
        assert "which its data no longer has\nrow 3, name" in said
        assert said.startswith("warning: the run trained on tokens 1")


def test_differing_settings_are_listed(page):
    text = page.read_text()
    assert "<td>optimizer.learning_rate<td>0.001<td>0.002<td>0.003" in text
    assert "<td>train.max_iters" not in text


@contextlib.contextmanager
def browser_tab(**settings):
    """Open a tab of headless Chromium; yield it, its console errors and its requests."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chromium")
    errors, requests = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab = browser.new_page(**settings)
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        yield tab, errors, requests
        browser.close()


IS_DRAWN = "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(page, width, scheme):
    look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with browser_tab(**look) as (tab, errors, requests):
        tab.goto(f"file://{page}")
        tab.wait_for_function(IS_DRAWN)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        for choice in ("tokens", "log"):
            tab.check(f"#{choice}")
        shown = tab.locator(".plot:visible")
        assert shown.count() == 6
        assert "tokens" in shown.first.get_attribute("class")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 20, 20)"}[scheme]
    assert not errors
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [f"file://{page}"]


@contextlib.contextmanager
def served(path):
    """Serve a run on a free port; yield the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxgpt.report", "serve", str(path), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert f"http://localhost:{port}/" in server.stdout.readline()
        yield port
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture
def live(runs, tmp_path):
    """Return the metrics.jsonl of a run that has written 500 steps, and the lines that follow."""
    lines = (runs / "plain" / "metrics.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "live" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("".join(lines[:500]))
    return path, "".join(lines[500:800])


def test_a_served_page_is_on_loopback_only_and_opens_no_other_path(live):
    with served(live[0].parent) as port:
        for good in ("/", "/live"):
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}{good}").status == 200
        for bad in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/metrics.jsonl", "/other"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{bad}")
        with pytest.raises(OSError):  # another of this host's addresses
            socket.create_connection(("127.0.0.2", port), 5).close()


def test_a_served_page_follows_the_records(live):
    from bokeh.document import Document
    from bokeh.models import ColumnDataSource, Div

    path, more = live
    document = Document()
    page_of([path.parent])(document)

    def newest():
        found = document.select({"type": ColumnDataSource})
        return max(int(s.data["steps"].max()) for s in found if len(s.data["steps"]))

    assert newest() == 500
    with path.open("a") as file:
        file.write(more)
    (callback,) = document.session_callbacks
    assert callback.period < 5000
    callback.callback()
    assert newest() == 800
    assert any("<td>800<td>" in div.text for div in document.select({"type": Div}))


def test_a_browser_follows_a_run_within_five_seconds(live):
    path, more = live
    newest = """() => Math.max(...[...Bokeh.documents[0]._all_models.values()]
        .filter(model => model.type == "ColumnDataSource" && model.data.steps?.length)
        .flatMap(model => [...model.data.steps]))"""
    with served(path.parent) as port, browser_tab() as (tab, errors, requests):
        tab.goto(f"http://localhost:{port}/")
        tab.wait_for_function(IS_DRAWN)
        assert tab.evaluate(newest) == 500
        with path.open("a") as file:
            file.write(more)
        tab.wait_for_function(f"({newest})() == 800", timeout=5000)
        assert not errors
        hosts = {urllib.parse.urlsplit(url).netloc for url in requests}
        assert hosts - {""} == {f"localhost:{port}"}
