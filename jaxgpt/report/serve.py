"""The report page, served on the loopback interface and updated while the runs continue."""

import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config import UsageError, in_words
from jaxgpt.report.page import CSS, TEMPLATE, Plots, sections
from jaxgpt.tracking.run_files import read_runs

HOST, PERIOD, MAX_POINTS, MAX_RUNS = "127.0.0.1", 2000, 1000, 8  # PERIOD: ms between updates


def serve(paths: Sequence[Path], port: int) -> None:
    """Serve the `MAX_RUNS` most recently active runs at /, and each run at /NAME.

    Blocks until interrupted. New runs appear only at /, and only after the page is reloaded. The
    files in run directories are not served. Call this in the main thread.

    Raises `UsageError` if the port cannot be opened.
    """
    runs = read_runs(paths)
    Plots(runs[:1], MAX_POINTS)  # raises `UsageError` if Bokeh is not installed
    from bokeh.server.server import Server

    apps = {f"/{urllib.parse.quote(run.name)}": page_of([run.directory]) for run in runs}
    apps["/"] = page_of(paths)
    origins = [f"{HOST}:{port}", f"localhost:{port}"]  # other websites cannot read the page
    try:
        server = Server(apps, address=HOST, port=port, allow_websocket_origin=origins)
    except OSError as error:
        text = f"--port={port}: cannot be opened ({in_words(error)}); give another port"
        raise UsageError(text) from None
    print(f"http://localhost:{port}/ shows the runs; Ctrl-C stops the server", flush=True)
    server.run_until_shutdown()


def page_of(paths: Sequence[Path]) -> Callable[[Any], None]:
    """Return a function that fills a Bokeh document with the runs in `paths`.

    The document shows the `MAX_RUNS` most recently active runs, and is updated every `PERIOD` ms.
    """

    def fill(document: Any) -> None:
        from bokeh.models import Div

        runs = sorted(read_runs(paths), key=lambda run: run.age())[:MAX_RUNS]
        document.title, document.template = ", ".join(run.name for run in runs), TEMPLATE
        plots = Plots(runs, MAX_POINTS)
        look = {"sizing_mode": "stretch_width", "stylesheets": [CSS], "disable_math": True}
        texts = {key: Div(tags=[key], **look) for key in ("above", "below")}

        def update() -> None:
            if any([run.refresh() for run in runs]):
                plots.update()
            for key, text in sections(runs, document.title).items():
                texts[key].text = text

        update()
        for root in (*plots.figures, *texts.values()):
            document.add_root(root)
        document.add_periodic_callback(update, PERIOD)

    return fill
