"""The steps of a run that are traced, and what is told about them."""

from typing import Any

from jax.stages import Compiled

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import profile_range
from jaxgpt.perf.profile import Tracing, describe
from jaxgpt.train.reporter import Reporter
from jaxgpt.train.run_directory import Run


class StepProfile:
    """Traces the steps of `profile_steps`, once; nothing where none are asked for."""

    def __init__(self, run: Run, cluster: ProcessGroup, train_step: Compiled, report: Reporter):
        self._todo = profile_range(run.config)
        self._directory = run.directory / "profile"
        self._cluster, self._train_step, self._report = cluster, train_step, report
        self._tracing: Tracing | None = None
        self._traced: list[int] = []

    def before(self, step: int, state: Any) -> None:
        """A step is about to be run on `state`."""
        if step not in self._todo:
            return
        if self._tracing is None:
            with self._report.between_steps(state):
                self._tracing = Tracing(self._directory, self._cluster)
                self._tracing.start(state)
        self._traced.append(step)

    def after(self, step: int, state: Any) -> None:
        """A step is under way, or has been skipped; `state` is what comes of it."""
        if self._tracing is not None and step >= self._todo[-1]:
            self.close(state)

    def close(self, state: Any) -> None:
        """Ends a trace that has begun, and tells what is in it; there is no other after it."""
        if self._tracing is None:
            return
        with self._report.between_steps(state):
            found = self._tracing.stop(state, len(self._traced), self._train_step.as_text())
            first, last = self._traced[0], self._traced[-1]
            skipped = last - first + 1 - len(self._traced)
            self._report.info(
                f"traced steps {first} to {last} into {self._directory}, which slows them a little"
                + (f"; {skipped} of them skipped" if skipped else "")
                + f"\n{describe(found)}"
            )
        self._tracing, self._todo = None, range(0)
