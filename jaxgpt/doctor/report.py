"""Run all checks and print a report, as text or as one JSON object.

This module imports JAX, so import it after `initialize_jax`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jax.sharding import Mesh

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.cluster.shutdown import DONE, FAILED
from jaxgpt.config import MeshShape
from jaxgpt.doctor.checks import Check, machine_checks
from jaxgpt.doctor.collectives import (
    Measurement,
    axis_link,
    collective_checks,
    default_mesh_shape,
    measure_axis,
)
from jaxgpt.doctor.directory import directory_checks
from jaxgpt.doctor.facts import collect_facts
from jaxgpt.doctor.training import training_check
from jaxgpt.parallel.mesh import describe, make_mesh

COLLECTIVES_SECONDS = 25.0  # time limit for all axes together


def run_checks(
    cluster: ProcessGroup,
    found: dict[str, Any],
    shape: MeshShape | None,
    directory: Path,
    as_json: bool,
) -> int:
    """Run all checks, print the report on process 0, and return an exit status.

    `found` is the result of `initialize_jax`. `shape` is the shape of a mesh that covers all
    devices. If it is None, `default_mesh_shape` chooses the mesh. `directory` is the run directory
    to check. If a collective fails, the training check fails without training. Every process must
    call this. The status is 1 if a check is FAIL, otherwise 0. If the monitor detects a hang, the
    job ends with status 70.
    """
    report = Report(cluster, found, as_json)
    report.begin("the machine")
    facts = collect_facts(cluster, found["coordinator"])
    job = [SimpleNamespace(**f) for f in cluster.allgather(facts)]
    report.section("machine", machine_checks(job, cluster, found))
    report.begin("the run directory")
    report.section("run directory", directory_checks(cluster, directory))
    mesh = make_mesh(shape or default_mesh_shape(cluster), cluster.hosts)
    _check_collectives(cluster, mesh, report)
    report.begin("training")
    broken = [c.name for c in report.checks if c.status == "FAIL" and " over " in c.name]
    if broken:  # training would also hang or fail in this collective
        finding = f"not tried, because {broken[0]} fails"
        trained = Check("training", "FAIL", finding, "fix that collective first")
    else:
        trained = training_check(cluster)
    report.section("ten data-parallel steps of a small model", [trained])
    report.summarize()
    return FAILED if any(check.status == "FAIL" for check in report.checks) else DONE


def _check_collectives(cluster: ProcessGroup, mesh: Mesh, report: "Report") -> None:
    """Measure collectives over each mesh axis of size 2 or more. Report each axis in a separate
    section.

    With a single device, report that there is nothing to measure.
    """
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    if not axes:
        finding = "nothing to measure with one device; try mpiexec -n 4, or --mesh 4,1,1"
        report.section("collectives", [Check("collectives", "OK", finding)])
    for axis in axes:
        measured = measure_axis(mesh, axis, cluster, COLLECTIVES_SECONDS / len(axes), report.begin)
        report.measurements += measured
        crosses, peak = axis_link(mesh, axis, cluster)
        place = "on different hosts" if crosses else "on the same host"
        where = f"{axis}: {mesh.shape[axis]} devices {place}, mesh {describe(mesh)}"
        report.section(f"collectives over {where}", collective_checks(measured, peak))


class Report:
    """The results of all checks so far. Process 0 prints the results.

    A process may hang, for example in a collective. If the monitor detects a hang, process 0 adds
    its current activity to the end of the report, unless process 0 itself has been stopped. The
    monitor then terminates the job.
    """

    def __init__(self, cluster: ProcessGroup, job: dict[str, Any], as_json: bool):
        """Set the monitor's `on_hang`, and start its thread.

        `job` is the result of `initialize_jax`.
        """
        self.checks: list[Check] = []
        self.measurements: list[Measurement] = []
        self._cluster, self._job, self._as_json = cluster, job, as_json
        self._activity = ""
        cluster.monitor.on_hang = self._give_up
        cluster.monitor.start()

    def begin(self, activity: str) -> None:
        """Start the next activity; see `Monitor.heartbeat`.

        All processes must begin the same activities in the same order.
        """
        self._activity = activity
        self._cluster.monitor.heartbeat(activity)

    def _give_up(self) -> None:
        """Report the checks so far. The monitor then reports the hang and terminates the job."""
        finding = f"no response within {self._cluster.timeout:.0f} s (--init-timeout)"
        remedy = "look for a hanging host or a firewall; NCCL_SOCKET_IFNAME sets the interface"
        self.section("stopped here", [Check(self._activity, "FAIL", finding, remedy)])
        self.summarize()

    def section(self, title: str, checks: Sequence[Check]) -> None:
        """Add a section of checks. Process 0 prints it, unless the report is JSON."""
        self.checks += checks
        if self._as_json or not self._cluster.is_main:
            return
        print(title)
        for check in checks:
            print(f"{check.status:4} {check.name}: {check.finding}")
            if check.remedy:
                print(f"     remedy: {check.remedy}")
        print(flush=True)

    def summarize(self) -> None:
        """On process 0, print the number of checks per status, or the whole report as JSON.

        The keys of the JSON object are `status` (the worst), `job`, `checks` and `collectives`.
        """
        counts = {s: sum(c.status == s for c in self.checks) for s in ("FAIL", "WARN", "OK")}
        text = ", ".join(f"{n} {status}" for status, n in reversed(counts.items()))
        if self._as_json:
            result = {
                "status": next((status for status, n in counts.items() if n), "OK"),
                "job": self._job,
                "checks": [asdict(check) for check in self.checks],
                "collectives": [asdict(m) for m in self.measurements],
            }
            text = json.dumps(result, indent=1)
        if self._cluster.is_main:
            print(text, flush=True)
