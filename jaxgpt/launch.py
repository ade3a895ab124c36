"""Start a command on all hosts of the job: with mpiexec, or with srun under Slurm.

`python -m jaxgpt.launch -- python -m jaxgpt.train ...` finds the hosts of its PBS or Slurm job (or
takes this one), the machine and its launcher, prints the line that it has built, and becomes it.
"""

import argparse
import os
import shlex
import sys
import time

from jaxgpt.cluster.environment import find_launch
from jaxgpt.cluster.launchers import ProcessLayout, find_launcher, place_processes
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.cluster.supervisor import Supervisor
from jaxgpt.config import CommandParser, UsageError, is_help, whole_number
from jaxgpt.perf.startup import JOB_START


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.launch",
        usage="%(prog)s [-n N] [--ppn P] [--hosts FILE] "
        "[--restarts R [--give-up-after N] [--spare-nodes K]] [--print] [--] COMMAND ...\n"
        "       %(prog)s [-n N] [--ppn P] [--hosts FILE] --export",
        description=__doc__,
    )
    count = whole_number()
    out.add_argument(
        "-n", "-np", "--np", "--ntasks", dest="n", type=count, metavar="N",
        help="processes; default: P on each host",
    )  # fmt: skip
    ppn = "processes on a host; default: N shared out evenly, else one for each device, else one"
    same = ("-ppn", "--nproc-per-node", "--ntasks-per-node")  # of mpiexec, torchrun, srun
    out.add_argument("--ppn", *same, type=count, metavar="P", help=ppn)
    out.add_argument(
        "--hosts", "-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile", metavar="FILE",
        help="hosts, one on each line (host, host:4 or host slots=4); default: those of "
        "PBS_NODEFILE, Slurm's allocation or HOSTFILE, else this host",
    )  # fmt: skip
    out.add_argument(
        "--restarts",
        type=whole_number(0),
        metavar="R",
        default=0,
        help="start COMMAND again, at most R times, when processes die, hang, or lose their host",
    )
    out.add_argument(
        "--give-up-after",
        type=whole_number(0),
        metavar="N",
        default=3,
        help="end after N tries in a row without a new checkpoint; 0 is never; default 3",
    )
    out.add_argument(
        "--spare-nodes",
        type=whole_number(0),
        metavar="K",
        default=0,
        help="keep the last K hosts free, to take the place of hosts that are lost",
    )
    out.add_argument("--print", action="store_true", help="only print the line, quoted for a shell")
    out.add_argument(
        "--export",
        action="store_true",
        help="print NHOSTS, NGPU_PER_HOST, NGPUS, HOSTFILE and DIST_LAUNCH for a shell: "
        'eval "$(python -m jaxgpt.launch --export)", then $DIST_LAUNCH python ...',
    )
    out.epilog = (
        "COMMAND's first word python or python3 means the Python that runs this, on all hosts; a "
        f"path means itself. {JOB_START}, where a job script has not set it, is the time of this "
        "launch."
    )
    return out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with job_exit_handler():
        options, command = split(argv)
        if is_help(options):
            parser().print_help()
            return
        arguments = parser().parse_args(options)
        layout = place(arguments, command)
        if command[:1] in (["python"], ["python3"]):
            command = [sys.executable, *command[1:]]
        if arguments.restarts and not arguments.print:
            print(f"launch: {layout}", file=sys.stderr, flush=True)
            limits = arguments.restarts, arguments.give_up_after
            sys.exit(Supervisor(layout, command, *limits).run())
        line = show(arguments, layout, command)
    if line is not None:
        os.execvp(line[0], line)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options, and the command: behind `--`, or from the first other word on."""
    if "--" in argv:
        place = argv.index("--")
        return argv[:place], argv[place + 1 :]
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        alone = argv[place] in ("--print", "--export", "-h", "--help") or "=" in argv[place]
        place += 1 if alone else 2
    return argv[:place], argv[place:]


def place(arguments: argparse.Namespace, command: list[str]) -> ProcessLayout:
    """Return where the processes go; `UsageError` if the options do not fit the job."""
    launch = find_launch(os.environ)
    if launch.variable is not None:
        raise UsageError(
            f"{launch.variable}: this process was itself started by a launcher "
            f"({launch.launcher}); run jaxgpt.launch once, from the job script or a shell (in "
            "Slurm one of salloc's, not of srun's)"
        )
    if arguments.export and command:
        raise UsageError(f"--export: starts nothing; leave out -- {command[0]}")
    if not arguments.export and not command:
        raise UsageError(
            "COMMAND: nothing to start; put it behind --, such as: python -m jaxgpt.launch -- "
            "python -m jaxgpt.train"
        )
    if arguments.spare_nodes and not arguments.restarts:
        raise UsageError(
            f"--spare-nodes={arguments.spare_nodes}: nothing takes a spare host's turn without "
            "--restarts R; give it too"
        )
    layout = place_processes(
        arguments.n, arguments.ppn, arguments.hosts, os.environ, arguments.spare_nodes
    )
    if not (arguments.print or arguments.export):
        os.environ.setdefault(JOB_START, f"{time.time():.3f}")  # before a line that passes it on
    return layout


def show(
    arguments: argparse.Namespace, layout: ProcessLayout, command: list[str]
) -> list[str] | None:
    """Print the line to become, and return it; None if printing is all that is wanted."""
    launcher = find_launcher(layout, os.environ)(layout, os.environ)
    print(f"launch: {layout}", file=sys.stderr, flush=True)
    if arguments.export:
        values = {  # ezpz's names
            "NHOSTS": len(layout.hosts),
            "NGPU_PER_HOST": layout.per_host,
            "NGPUS": layout.n_processes,
            "HOSTFILE": layout.host_file or "",
            "DIST_LAUNCH": shlex.join(launcher),
        }
        for name, value in values.items():
            print(f"export {name}={shlex.quote(str(value))}")
        return None
    line = [*launcher, *command]
    if arguments.print:
        print(shlex.join(line))
        return None
    print(f"launch: {shlex.join(line)}", file=sys.stderr, flush=True)
    return line


if __name__ == "__main__":
    main()
