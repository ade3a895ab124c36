"""The HTML page of a report: Bokeh figures, tables, samples, text behind spikes, and settings."""

import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxgpt.config import UsageError
from jaxgpt.inspect import row_text
from jaxgpt.report.events import events
from jaxgpt.report.panels import COLORS, MARKS, MAX_POINTS, PANELS, Panel, Series, series_of
from jaxgpt.tracking.run_files import RunFiles, read_text
from jaxgpt.tracking.starts import read_starts
from jaxgpt.train.reporting.goodput import account, goodput_records

SHOWN_SPIKES, SHOWN_ROWS, SHOWN_SAMPLES, SHOWN_STARTS = 20, 2, 50, 10  # per run (rows: per spike)
STYLES: dict[str, dict[str, Any]] = {  # Bokeh options for `Series.style`
    "raw": {"alpha": 0.25}, "smooth": {"width": 1.8}, "line": {"width": 1.5}, "points": {},
    "dropped": {},
}  # fmt: skip
DASHES = ("solid", "dashed", "dotdash", "dotted")  # of the curves of a panel
# In the dark theme, the colors of the figures are inverted.
CSS = """:root, :host { color-scheme: light dark } p { margin: 4px 0 12px }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1500px; margin: auto; padding: 12px;
  background: light-dark(#fff, #141414); color: light-dark(#222, #ddd) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr));
  gap: 12px } .wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { border-bottom: 1px solid #8884; padding: 3px 12px 3px 0; text-align: left }
th, .swatch, label { white-space: nowrap; margin-right: 8px } .bar { display: flex; height: 16px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; background: #8882 }
@media (prefers-color-scheme: dark) {
  .plot, .bar, .swatch b { filter: invert(.92) hue-rotate(180deg) } }
"""
# Each panel is drawn once for each choice of axes. Radio buttons select the version to show.
TEMPLATE = """{% from macros import embed %}{% block postamble %}
<meta name="viewport" content="width=device-width, initial-scale=1"><style>CSS
body:has(#steps:checked) .tokens, body:has(#tokens:checked) .steps,
body:has(#linear:checked) .log, body:has(#log:checked) .linear { display: none }</style>
{% endblock %}{% block contents %}{{ above }}
{% for root in roots if "above" in root.tags %}{{ embed(root) }}{% endfor %}
<p>x-axis: <label><input type="radio" name="x" id="steps" checked> steps</label>
<label><input type="radio" name="x" id="tokens"> tokens</label>
y-axis: <label><input type="radio" name="y" id="linear" checked> linear</label>
<label><input type="radio" name="y" id="log"> logarithmic</label></p>
<div class="plots">{% for root in roots if "plot" in root.tags %}
<div class="{{ root.tags | join(" ") }}">{{ embed(root) }}</div>{% endfor %}</div>
{% for root in roots if "below" in root.tags %}{{ embed(root) }}{% endfor %}
{{ below }}{% endblock %}""".replace("CSS", CSS)


class Plots:
    """The Bokeh figures on a page. Raises `UsageError` if Bokeh is not installed."""

    def __init__(self, runs: Sequence[RunFiles], limit: int = MAX_POINTS):
        """Plot the runs, with at most `limit` points per curve. `limit` must be at least 2."""
        try:
            from bokeh.models import ColumnDataSource, DataRange1d
        except ImportError:
            text = "report: needs bokeh; pip install 'jaxgpt[report]', or use --text"
            raise UsageError(text) from None
        self.runs, self._limit = runs, limit
        self._sources = defaultdict[tuple[Any, ...], Any](ColumnDataSource)
        self._curves: dict[tuple[str, int], list[Series]] = {}  # by panel and number of the run
        self.update()
        found = [(title, one) for (title, _), curves in self._curves.items() for one in curves]
        shown = {title for title, one in found if len(one.columns["y"])}
        ranges = {x: DataRange1d(range_padding=0.02) for x in ("steps", "tokens")}
        self.figures = [
            self._panel(panel, [x, y][: 1 + panel.has_log], x_range=ranges[x], y_axis_type=y)
            for panel, x, y in itertools.product(PANELS, ranges, ("linear", "log"))
            if panel.title in shown or not shown  # no run has records yet
            if y == "linear" or panel.has_log
        ]

    def update(self) -> None:
        """Update the figures from the records of the runs.

        Call `RunFiles.refresh` first to read new records. No figures are added.
        """
        for (i, run), panel in itertools.product(enumerate(self.runs), PANELS):
            curves, marks = series_of(run, panel, self._limit)
            self._curves[panel.title, i] = curves
            for n, series in enumerate(curves):
                self._sources[panel.title, i, n].data = series.columns
            self._sources[panel.title, i, "marks"].data = marks

    def _panel(self, panel: Panel, tags: list[str], **axes: Any) -> Any:
        from bokeh.models import HoverTool, NumeralTickFormatter
        from bokeh.plotting import figure

        # No drag tool is active at first, so a swipe scrolls the page on phones.
        fig = figure(
            title=panel.title, tags=["plot", *tags], height=300, sizing_mode="stretch_width",
            tools="xbox_zoom,box_zoom,pan,reset,save", active_drag=None, **axes,
        )  # fmt: skip
        x, several = tags[0], len(self.runs) > 1
        fig.xaxis.axis_label, fig.yaxis.axis_label, fig.toolbar.logo = x, panel.unit or None, None
        fig.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
        lines, marks = [], []
        for i, run in enumerate(self.runs):
            for n, (curve, style, label, _) in enumerate(self._curves[panel.title, i]):
                source = self._sources[panel.title, i, n]
                color = COLORS[(i if several else curve) % 8]
                look = {"source": source, "name": f"{run.name}, {label}", "color": color}
                if len(source.data["y"]) and (several or len(panel.curves) > 1):
                    look["legend_label"] = run.name if several else label
                lines.append(fig.line(x, "y", **look, **STYLES[style], line_dash=DASHES[curve]))
                if style == "points" or np.isfinite(source.data["y"]).sum() == 1:
                    fig.scatter(x, "y", **look)
            look = {"source": self._sources[panel.title, i, "marks"], "color": "color"}
            fig.vstrip(x, f"{x}_end", **look, alpha=0.15)
            marks.append(fig.scatter(x, "y", **look, marker="marker", size=9))
        about = [("", "$name"), ("step", "@steps{0,0}"), ("tokens", "@tokens{0.00a}"), ("", "@y")]
        fig.add_tools(HoverTool(renderers=lines, tooltips=about))
        fig.add_tools(HoverTool(renderers=marks, tooltips=[("@kind", "@text")]))
        if fig.legend:
            fig.legend.click_policy, fig.legend.background_fill_alpha = "hide", 0.6
        return fig


def page(runs: Sequence[RunFiles], title: str) -> str:
    """Return the report on one or more runs as one HTML page."""
    plots = Plots(runs, min(MAX_POINTS, 6000 // len(runs)))  # so that the page stays small
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    texts = {"template": TEMPLATE, "template_variables": sections(runs, title)}
    return file_html(plots.figures, INLINE, title, **texts)


def sections(runs: Sequence[RunFiles], title: str) -> dict[str, str]:
    """Return the HTML `above` and `below` the plots of one or more runs."""
    rows = [run.row() for run in runs]
    cells = [[html.escape(str("-" if v is None else v)) for v in r.values()] for r in rows]
    for i, run in enumerate(runs):
        cells[i][0] = _swatch(COLORS[i % len(COLORS)], run.name)
    marks = [events(run.records) for run in runs]
    kinds = {mark.kind for of_run in marks for mark in of_run}
    legend = " ".join(_swatch(c, meaning) for k, (c, _, _, meaning) in MARKS.items() if k in kinds)
    above = f"<h1>{html.escape(title)}</h1>{_table(list(rows[0]), cells)}<p>{legend}</p>"
    for panel in PANELS:
        if len(runs) > 1 and len(panel.curves) > 1:  # the color shows the run
            curves = zip(DASHES, panel.curves, strict=False)
            named = "; ".join(f"{dash}: {label}" for dash, (*_, label) in curves)
            above += f"<p>Lines in {panel.title}: {named}</p>"
    goodput = [(r.name, account(goodput_records(g))) for r in runs if (g := r.records["goodput"])]
    startup = [
        (f"{run.name}, start {number}", {name: s["max"] for name, s in done["phases"].items()})
        for run in runs
        for number, start in list(enumerate(read_starts(run.directory), 1))[-SHOWN_STARTS:]
        if (done := start["first_step"])
    ]
    below = _bars("Goodput", goodput) + _bars("Start-up, slowest process", startup)
    settings = [run.settings() for run in runs]
    values = {key: [one.get(key, "-") for one in settings] for one in settings for key in one}
    different = [[key, *v] for key, v in values.items() if len({*v}) > 1 and key != "out"]
    if different:
        cells = [[*map(html.escape, row)] for row in different]
        table = _table(["setting", *(run.name for run in runs)], cells)
        below += f"<h2>Settings that differ</h2>{table}"
    for run, of_run in zip(runs, marks, strict=True):
        below += f"<h2>{html.escape(run.name)}</h2>"
        cells = [[f"{mark.step:,}", mark.kind, html.escape(mark.text)] for mark in of_run]
        below += _fold("Events", _table(("step", "event", ""), cells)) if cells else ""
        for mark in [mark for mark in of_run if mark.record][:SHOWN_SPIKES]:
            rows = [
                (r["row"], r["corpus"], str(r.get("source", "")), r["offset"])
                for r in mark.record["rows"][:SHOWN_ROWS]
            ]
            text = "".join(_pre(row_text(run.directory, mark.step, *row)) for row in rows)
            below += _fold(f"Text behind the spike at step {mark.step:,}", text)
        for record in run.records["sample"][-SHOWN_SAMPLES:]:
            below += _fold(f"Sample at step {record['step']:,}", _pre(record["text"]))
        below += _fold("Configuration", _pre(read_text(run.directory / "config.yaml"), 20_000))
    return {"above": above, "below": below}


def _bars(title: str, rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Return HTML with a stacked bar for each row. The parts of a bar are in seconds."""
    names = dict.fromkeys(name for _, parts in rows for name, s in parts.items() if s >= 0.05)
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    longest, out = max((sum(parts.values()) for _, parts in rows), default=0), ""
    for label, parts in rows if longest else ():
        shown = {name: s for name, s in parts.items() if s >= 0.05}
        spans = (f'<i style="width:{100 * s / longest}%;background:{color[n]}"></i>'
                 for n, s in shown.items())  # fmt: skip
        legend = " ".join(_swatch(color[name], f"{name} {s:,.1f} s") for name, s in shown.items())
        out += f'{html.escape(label)}<div class="bar">{"".join(spans)}</div><p>{legend}</p>'
    return f"<h2>{title}</h2>{out}" if out else ""


def _swatch(color: str, text: str) -> str:
    return f'<span class="swatch"><b style="color:{color}">■</b> {html.escape(text)}</span>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:  # cells are HTML
    head = "".join(f"<th>{html.escape(heading)}" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f'<div class="wide"><table><tr>{head}{body}</table></div>'


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _pre(text: str, limit: int = 2000) -> str:
    return f"<pre>{html.escape(text[:limit])}{' ...' if len(text) > limit else ''}</pre>"
