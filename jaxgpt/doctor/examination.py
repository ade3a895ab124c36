"""The whole examination, in order, and what happens when some part of it does not answer."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxgpt.cluster import shutdown as exits
from jaxgpt.cluster.hosts import job_hosts
from jaxgpt.cluster.process_group import ProcessGroup, catch_usage_error
from jaxgpt.config import MESH_AXES
from jaxgpt.doctor.checks import Check, machine_checks
from jaxgpt.doctor.clocks import clock_check
from jaxgpt.doctor.collectives import collective_checks, measure_axis, tried
from jaxgpt.doctor.directory import directory_checks
from jaxgpt.doctor.facts import addresses_of, from_json, interface_of, look
from jaxgpt.doctor.report import Report
from jaxgpt.doctor.training import train_ten_steps, training_check
from jaxgpt.parallel.mesh import describe, make_mesh
from jaxgpt.perf.hardware import find_device
from jaxgpt.runtime.jax_internals import failure_board

TIME_FOR_COLLECTIVES = 25.0  # seconds, all axes together
UNTIL_REPORTED = 5  # seconds that process 0 gets for its report, before the others give up, too
SLOW = 0.1  # of the bandwidth that a data sheet promises


def examine(
    cluster: ProcessGroup,
    found: dict[str, Any],
    sizes: tuple[int, ...] | None,
    directory: Path,
    as_json: bool,
) -> int:
    """Looks at everything, and prints what it finds.

    Args:
        found: what `initialize_jax` returned.
        sizes: of the mesh; None chooses them by `default_sizes`.
        directory: where a run would write.
        as_json: print one JSON object for programs.

    Returns:
        An exit status: `exits.DONE`, or `exits.FAILED` if a check failed.
    """
    report = Report(cluster, as_json, job=found)
    with watched(cluster, report) as doing:
        doing("the machine")
        report.section("machine", _machine(cluster, found))
        doing("the run directory")
        report.section("run directory", directory_checks(cluster, directory))
        mesh = make_mesh(sizes or default_sizes(cluster), cluster.hosts)
        _collectives(cluster, mesh, report, doing)
        doing("training")
        report.section("ten data-parallel steps of a small model", [_training(cluster, report)])
    report.close()
    return exits.FAILED if report.failed else exits.DONE


def default_sizes(cluster: ProcessGroup) -> tuple[int, ...]:
    """A mesh that tells the network from the inside of a host: data over hosts, tensor inside.

    On one host, or where hosts have different numbers of devices, all devices are along data.
    """
    n_devices, n_hosts = jax.device_count(), len(set(cluster.hosts))
    on_host = [0] * cluster.size
    for device in jax.devices():
        on_host[cluster.hosts[device.process_index]] += 1
    even = len({n for n in on_host if n}) == 1
    if n_hosts == 1 or not even:
        return n_devices, 1, 1
    return n_hosts, 1, n_devices // n_hosts


def _machine(cluster: ProcessGroup, found: dict[str, Any]) -> list[Check]:
    everyone = [from_json(f) for f in cluster.allgather(asdict(look(cluster)))]
    hosts, error = catch_usage_error(job_hosts, os.environ) if cluster.is_main else (None, None)
    interface = None
    if found["coordinator"]:
        # As other hosts see it: process 0's own host may know itself by a loopback address.
        seen = cluster.allgather(addresses_of(found["coordinator"].rpartition(":")[0].strip("[]")))
        others = [a for r, h in enumerate(cluster.hosts) if h != cluster.hosts[0] for a in seen[r]]
        interface = interface_of(others or seen[0])
    allocated = error or len(hosts[0]) if cluster.is_main else None
    allocated, interface = cluster.broadcast([allocated, interface])
    return [
        *machine_checks(everyone, cluster, found, allocated, interface),
        clock_check(cluster),
    ]


def _collectives(
    cluster: ProcessGroup, mesh: Mesh, report: Report, doing: Callable[[str], None]
) -> None:
    axes = [axis for axis in MESH_AXES if mesh.shape[axis] > 1]
    if not axes:
        line = Check(
            "collectives",
            "OK",
            "nothing to measure with one device: try mpiexec -n 4, or --mesh 4,1,1",
        )
        report.section("collectives", [line])
    for axis in axes:
        measured = measure_axis(mesh, axis, cluster, TIME_FOR_COLLECTIVES / len(axes), doing)
        crosses, peak = link(mesh, axis, cluster)
        report.section(
            f"collectives over {axis}: {mesh.shape[axis]} devices"
            f"{' of different hosts' if crosses else ' inside a host'}, mesh {describe(mesh)}",
            collective_checks(measured, peak and SLOW * peak),
            measured,
        )


def link(mesh: Mesh, axis: str, cluster: ProcessGroup) -> tuple[bool, float | None]:
    """Whether a mesh axis crosses hosts, and the bytes/s that each device can then send.

    None where the device is not in the table of data sheets.
    """
    groups = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    crosses = any(len({cluster.hosts[d.process_index] for d in group}) > 1 for group in groups)
    device = find_device(mesh.devices.flat[0].device_kind)
    if device is None:
        return crosses, None
    return crosses, device.network_bandwidth if crosses else device.link_bandwidth


def _training(cluster: ProcessGroup, report: Report) -> Check:
    """The steps, unless a collective has failed: they would wait for it."""
    broken = [c.name for c in report.checks if c.status == "FAIL" and " over " in c.name]
    if broken:
        return Check(
            "training", "FAIL", f"not tried, since {broken[0]} fails", "repair that one first"
        )
    result, error = tried("training", cluster.rank, train_ten_steps, cluster)
    everyone = cluster.allgather([result, error])
    error = next((f"process {r}: {e}" for r, (_, e) in enumerate(everyone) if e), None)
    if error:
        return Check("training", "FAIL", error, "the lines above this report may say more")
    return training_check([tuple(r) for r, _ in everyone], jax.device_count())


@contextlib.contextmanager
def watched(cluster: ProcessGroup, report: Report) -> Iterator[Callable[[str], None]]:
    """Ends the process, with what the report has, if something takes longer than the timeout.

    A process that is gone, or a network that swallows what it is given, leaves the others in a
    collective that never returns.

    Yields:
        A function that is to be told what comes next.
    """
    now = ["", time.monotonic()]
    done = threading.Event()

    def watch() -> None:
        limit = cluster.timeout + (0 if cluster.is_main else UNTIL_REPORTED)
        while not done.wait(0.2):
            if time.monotonic() - now[1] > limit:
                break
        else:
            return
        finding = f"no answer within {cluster.timeout:.0f} s (--init-timeout)"
        remedy = (
            "look for a host that hangs or a firewall between hosts; NCCL_SOCKET_IFNAME "
            "chooses NCCL's interface"
        )
        if cluster.is_main:
            report.section("stopped here", [Check(now[0], "FAIL", finding, remedy)])
            report.close()
            exits.terminate_job("", exits.FAILED, failure_board(), UNTIL_REPORTED + 2)
        text = f"error: {now[0]}: {finding}, nor from process 0; {remedy}\n"
        exits.terminate_job(text, exits.FAILED, failure_board())

    def doing(what: str) -> None:
        now[:] = [what, time.monotonic()]

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield doing
    finally:
        done.set()
