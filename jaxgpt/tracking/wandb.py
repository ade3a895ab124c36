"""Weights & Biases, online or offline.

W&B reads its other settings, such as WANDB_MODE=offline and WANDB_ENTITY, from the environment and
from the files of `wandb login`.
"""

import html
from typing import Any

from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.config import UsageError
from jaxgpt.tracking.about import names, settings
from jaxgpt.tracking.curves import curves
from jaxgpt.tracking.records import Record


class Wandb:
    """Writes a W&B run, with its local files in wandb/ in the run directory.

    A resumed or rewound run continues as the same W&B run: `resume_from` makes W&B drop its later
    steps. In offline mode, this happens when `wandb sync` uploads the files.

    W&B accepts values only for its newest step. Evaluations and other records may be about an
    earlier step, so the charts of their groups have an x-axis of their own, such as `eval/at_step`.
    """

    extra = "wandb"  # the package that it needs, which is also the name of jaxgpt's extra
    view = ""

    def __init__(self) -> None:
        self._wandb_run: Any = None

    def open(self, run: Any, resume_step: int | None) -> None:
        self._run = run
        self._folder = run.directory.absolute() / "wandb"
        self._id_file = self._folder / "jaxgpt-run-id"
        self._start(resume_step)

    def rewind(self, step: int) -> None:
        self._start(step)

    def _start(self, resume_step: int | None) -> None:
        """Start a W&B run, or continue the one of this run directory after `resume_step`."""
        import wandb

        self.close()
        base = wandb.setup(wandb.Settings(silent=True)).settings
        if base.mode == "online" and not wandb.login(prompt=False):
            raise UsageError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._folder.mkdir(exist_ok=True)
        continued: dict[str, Any] = {}
        if resume_step is not None and self._id_file.exists():
            continued["resume_from"] = f"{self._id_file.read_text().strip()}?_step={resume_step}"
        self._wandb_run = wandb.init(
            **names(self._run),
            **continued,
            dir=self._folder.parent,
            config=settings(self._run.config),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",  # otherwise, W&B would replace sys.stdout
                finish_timeout=ANSWER / 2,
                finish_timeout_raises=True,
            ),
        )
        self._id_file.write_text(f"{self._wandb_run.id}\n")
        self._step = resume_step or 0
        folder = self._run.directory / "wandb"
        offline = f"wandb sync {folder}/offline-run-*-{self._wandb_run.id}*"
        self.view = self._wandb_run.url or offline

    def log(self, record: Record) -> None:
        import wandb

        values: dict[str, Any] = curves(record)
        if record.kind == "train":
            self._step = record.step
        else:
            for group in {tag.partition("/")[0] for tag in values}:
                self._wandb_run.define_metric(f"{group}/*", step_metric=f"{group}/at_step")
                values[f"{group}/at_step"] = record.step
        if record.kind == "startup":
            self._wandb_run.summary.update({"startup": dict(record.values)})
        if record.kind == "sample":
            values["sample"] = wandb.Html(f"<pre>{html.escape(record.text)}</pre>")
        if values:
            self._wandb_run.log(values, step=self._step)

    def close(self) -> None:
        wandb_run, self._wandb_run = self._wandb_run, None
        if wandb_run is not None:
            wandb_run.finish()
