"""Weights & Biases, online or offline.

W&B reads additional settings, such as WANDB_MODE=offline and WANDB_ENTITY, from the environment and
from the files that `wandb login` writes.
"""

import html
from typing import Any

from jaxgpt.cluster.timeouts import ANSWER
from jaxgpt.config import UsageError
from jaxgpt.tracking.about import flat_settings, names
from jaxgpt.tracking.curves import curves
from jaxgpt.tracking.jsonl import METRICS, PERSISTENT_KINDS, atomic_write_text, read_records
from jaxgpt.tracking.records import Record

IN_ORDER = ("train", "eval", "sample")  # kinds of records that are logged in step order


class Wandb:
    """Logs to a W&B run, whose local files are in wandb/ in the run directory.

    A resumed or rewound run continues the same W&B run, and `resume_from` makes W&B drop the later
    steps. In offline mode, W&B drops them when `wandb sync` uploads the files. If the process was
    killed, W&B may have lost the last records, so they are logged again from metrics.jsonl, except
    goodput records. A new W&B run begins if there is no checkpoint to resume from. In offline mode,
    one also begins after a rewind to step 0, or if the existing W&B run was never closed (by a
    rewind or at the end of a process), because its process was killed.

    W&B accepts values only for the newest step. Evaluations and some other records may belong to an
    earlier step, so their charts have a separate x-axis, such as `eval/at_step`.

    `open` and `rewind` raise `UsageError` if W&B is online and there is no API key. Methods raise
    `ValueError` if the file that stores the run ID is damaged. They raise `OSError` if this file
    cannot be read, or if the folder for W&B's files cannot be created.
    """

    extra = "wandb"  # name of the required package, and of the jaxgpt extra that installs it

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
        """Start a W&B run, or continue the existing one after `resume_step`."""
        import wandb

        self.close()
        base = wandb.setup(wandb.Settings(silent=True)).settings
        if base.mode == "online" and not wandb.login(prompt=False):
            raise UsageError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._folder.mkdir(exist_ok=True)
        continued, complete = {}, 0
        if resume_step is not None and self._id_file.exists():
            run_id, n_complete = self._id_file.read_text().split()
            complete = min(int(n_complete), resume_step)
            # In offline mode, a killed process may not have written the start of the W&B run.
            if complete or base.mode == "online":
                continued["resume_from"] = f"{run_id}?_step={complete}"
        self._wandb_run = wandb.init(
            **names(self._run),
            **continued,
            dir=self._folder.parent,
            config=flat_settings(self._run.config.to_dict()),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",  # keeps W&B from replacing sys.stdout
                finish_timeout=ANSWER / 2,
                finish_timeout_raises=True,
            ),
        )
        self._step = complete + 1 if continued else 0
        self._keep_id(complete)
        folder = self._run.directory / "wandb"
        offline = f"wandb sync {folder}/offline-run-*-{self._wandb_run.id}*"
        self.view = self._wandb_run.url or offline
        is_resumed = resume_step is not None
        least = self._step  # 0 in a new W&B run, for the evaluation before step 1
        for record in read_records(self._run.directory / METRICS) if is_resumed else ():
            is_missing = least <= record["step"] <= resume_step
            if is_missing and record["kind"] not in PERSISTENT_KINDS:
                self._log(record)

    def _keep_id(self, complete: int) -> None:
        """Save the ID of the W&B run and its last complete step."""
        atomic_write_text(self._id_file, f"{self._wandb_run.id} {complete}\n")

    def log(self, record: Record) -> None:
        self._log(record.to_dict())

    def _log(self, record: dict[str, Any]) -> None:
        import wandb

        values: dict[str, Any] = curves(record)
        if record["kind"] in IN_ORDER:
            self._step = max(self._step, record["step"])
        if record["kind"] != "train":
            for group in {tag.partition("/")[0] for tag in values}:
                self._wandb_run.define_metric(f"{group}/*", step_metric=f"{group}/at_step")
                values[f"{group}/at_step"] = record["step"]
        if record["kind"] == "startup":
            self._wandb_run.summary.update({"startup": record})
        if record["kind"] == "sample":
            values["sample"] = wandb.Html(f"<pre>{html.escape(record['text'])}</pre>")
        if values:
            self._wandb_run.log(values, step=self._step)

    def close(self) -> None:
        if self._wandb_run is not None:
            self._wandb_run.finish()
            self._keep_id(self._step)
            self._wandb_run = None
