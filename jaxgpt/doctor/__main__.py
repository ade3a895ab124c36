"""Check whether a machine is fit to train on: `python -m jaxgpt.doctor`, alone or under `mpiexec`.

It looks at versions, the launcher, hosts, devices, the run directory and clocks, checks and times
every collective on each mesh axis, and trains a small model for ten steps. Every line says OK,
WARN or FAIL, and what to do. Exit status: 0, or 1 if anything failed.
"""

import argparse
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxgpt.cluster import shutdown
from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.hosts import job_hosts
from jaxgpt.cluster.process_group import (
    INIT_TIMEOUT,
    ProcessGroup,
    catch_usage_error,
    join_process_group,
)
from jaxgpt.config import CommandParser, Config, MeshShape, file_path, is_help, mesh_shape
from jaxgpt.config.schema import MAX_INIT_TIMEOUT
from jaxgpt.doctor.checks import Check, fail, machine_checks, ok
from jaxgpt.doctor.clocks import clock_check
from jaxgpt.doctor.directory import check_writable, directory_checks
from jaxgpt.doctor.facts import addresses_of, collect_facts, from_json, interface_of
from jaxgpt.runtime.initialize import initialize_jax
from jaxgpt.runtime.jax_internals import failure_board

OUT = Path("runs")  # where runs without --out are written
COLLECTIVES_SECONDS = 25.0  # for all axes together
REPORT_SECONDS = 5  # for process 0 to print its report, before the others give up, too
SLOW = 0.1  # of the bandwidth that a data sheet promises


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--json", action="store_true", help="for programs: one object, at the end")
    out.add_argument(
        "--mesh",
        metavar="D,F,T",
        help="measure collectives on this mesh; default: data over hosts and tensor inside, on one "
        "host all devices along data; alone on a CPU 4,1,1 of simulated devices",
    )
    out.add_argument("--out", type=file_path, metavar="DIR", help=f"run directory; default: {OUT}")
    out.add_argument(
        "--init-timeout",
        type=seconds,
        default=INIT_TIMEOUT,
        metavar="S",
        help="seconds to wait for processes that do not come, or do not answer; default "
        f"{INIT_TIMEOUT:.0f}",
    )
    return out


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MAX_INIT_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} must be seconds, from 1 to {MAX_INIT_TIMEOUT}")
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with `mesh` as a Config of that mesh, or None.

    Raises:
        UsageError: if one is unknown or cannot work.
    """
    arguments = parser().parse_args(argv)
    if arguments.mesh is not None:
        # No model, whose heads a tensor axis would have to divide.
        arguments.mesh = Config().replace(parallel__mesh=arguments.mesh, model__n_head=0)
        mesh_shape(arguments.mesh)
    return arguments


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with shutdown.job_exit_handler(failure_board):
        if is_help(argv):
            if rank_from_env() == 0:
                parser().print_help()
            return
        arguments, error = catch_usage_error(parse, argv)
        cluster = join_process_group(arguments.init_timeout if arguments else INIT_TIMEOUT)
        cluster.raise_if_any(error)
        if arguments.out is not None:
            cluster.run_on_all(lambda: cluster.is_main and check_writable(arguments.out))
        alone = MeshShape(4 if cluster.size == 1 else -1)
        shape = mesh_shape(arguments.mesh) if arguments.mesh else alone
        found = initialize_jax(cluster, shape, allow_cpu=True)
        shape = mesh_shape(arguments.mesh, found["devices"]) if arguments.mesh else None
        status = run_checks(cluster, found, shape, arguments.out or OUT, arguments.json)
    sys.exit(status)


def run_checks(
    cluster: ProcessGroup,
    found: dict[str, Any],
    shape: MeshShape | None,
    directory: Path,
    as_json: bool,
) -> int:
    """Run all checks, and print the report. JAX has been started.

    Args:
        found: returned by `initialize_jax`.
        shape: of the mesh; None chooses them by `default_sizes`.
        directory: where a run would write.
        as_json: print one JSON object for programs.

    Returns:
        An exit status: `shutdown.DONE`, or `shutdown.FAILED` if a check failed.
    """
    # These modules import JAX, after initialize_jax.
    from jaxgpt.doctor.links import default_sizes
    from jaxgpt.doctor.report import Report
    from jaxgpt.parallel.mesh import make_mesh

    report = Report(cluster, as_json, job=found)
    with timeout_guard(cluster, report) as set_activity:
        set_activity("the machine")
        report.section("machine", check_machine(cluster, found))
        set_activity("the run directory")
        report.section("run directory", directory_checks(cluster, directory))
        mesh = make_mesh(shape or default_sizes(cluster), cluster.hosts)
        check_collectives(cluster, mesh, report, set_activity)
        set_activity("training")
        report.section(
            "ten data-parallel steps of a small model", [check_training(cluster, report)]
        )
    report.close()
    return shutdown.FAILED if report.failed else shutdown.DONE


def check_machine(cluster: ProcessGroup, found: dict[str, Any]) -> list[Check]:
    job = [from_json(f) for f in cluster.allgather(asdict(collect_facts(cluster)))]
    hosts, error = catch_usage_error(job_hosts, os.environ) if cluster.is_main else (None, None)
    interface = None
    if found["coordinator"]:
        # As other hosts see it: process 0's own host may know itself by a loopback address.
        seen = cluster.allgather(addresses_of(found["coordinator"].rpartition(":")[0].strip("[]")))
        others = [a for r, h in enumerate(cluster.hosts) if h != cluster.hosts[0] for a in seen[r]]
        interface = interface_of(others or seen[0])
    allocated = error or len(hosts[0]) if cluster.is_main else None
    allocated, interface = cluster.broadcast([allocated, interface])
    return [*machine_checks(job, cluster, found, allocated, interface), clock_check(cluster)]


def check_collectives(
    cluster: ProcessGroup, mesh: Any, report: Any, set_activity: Callable[[str], None]
) -> None:
    """Add a section to the report for each mesh axis."""
    from jaxgpt.doctor.collectives import collective_checks, measure_axis
    from jaxgpt.doctor.links import axis_link
    from jaxgpt.parallel.mesh import describe

    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    if not axes:
        finding = "nothing to measure with one device: try mpiexec -n 4, or --mesh 4,1,1"
        report.section("collectives", [ok("collectives", finding)])
    for axis in axes:
        measured = measure_axis(mesh, axis, cluster, COLLECTIVES_SECONDS / len(axes), set_activity)
        crosses, peak = axis_link(mesh, axis, cluster)
        report.section(
            f"collectives over {axis}: {mesh.shape[axis]} devices"
            f"{' of different hosts' if crosses else ' inside a host'}, mesh {describe(mesh)}",
            collective_checks(measured, peak and SLOW * peak),
            measured,
        )


def check_training(cluster: ProcessGroup, report: Any) -> Check:
    """Train ten steps, unless a collective has failed: they would wait for it."""
    import jax

    from jaxgpt.doctor.collectives import catch_error, first_error
    from jaxgpt.doctor.training import train_ten_steps, training_check

    broken = [c.name for c in report.checks if c.status == "FAIL" and " over " in c.name]
    if broken:
        return fail("training", f"not tried, since {broken[0]} fails", "repair that one first")
    result, error = catch_error("training", cluster, train_ten_steps, cluster)
    found = cluster.allgather([result, error])
    if error := first_error([error for _, error in found]):
        return fail("training", error, "the lines above this report may say more")
    return training_check([tuple(result) for result, _ in found], jax.device_count())


@contextlib.contextmanager
def timeout_guard(cluster: ProcessGroup, report: Any) -> Iterator[Callable[[str], None]]:
    """End the process, with what the report has, if an activity takes longer than the timeout.

    A process that is gone, or a network that swallows what it is given, leaves the others in a
    collective that never returns.

    Yields:
        A function to call with the name of each activity when it begins.
    """
    activity, since = "", time.monotonic()
    done = threading.Event()

    def set_activity(name: str) -> None:
        nonlocal activity, since
        activity, since = name, time.monotonic()

    def watch() -> None:
        limit = cluster.timeout + (0 if cluster.is_main else REPORT_SECONDS)
        while time.monotonic() - since <= limit:
            if done.wait(0.2):
                return
        finding = f"no answer within {cluster.timeout:.0f} s (--init-timeout)"
        remedy = (
            "look for a host that hangs or a firewall between hosts; NCCL_SOCKET_IFNAME "
            "chooses NCCL's interface"
        )
        if cluster.is_main:
            report.section("stopped here", [fail(activity, finding, remedy)])
            report.close()
            shutdown.terminate_job("", shutdown.FAILED, failure_board(), REPORT_SECONDS + 2)
        text = f"error: {activity}: {finding}, nor from process 0; {remedy}\n"
        shutdown.terminate_job(text, shutdown.FAILED, failure_board())

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield set_activity
    finally:
        done.set()


if __name__ == "__main__":
    main()
