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
from jaxgpt.config import CommandParser, UsageError, whole_number
from jaxgpt.perf.startup import JOB_START


def parser() -> CommandParser:
    out = CommandParser(
        prog="python -m jaxgpt.launch",
        usage="%(prog)s [-n N] [--ppn P] [--hosts FILE] "
        "[--restarts R [--give-up-after N] [--spare-nodes K]] [--print] [--] COMMAND ...",
        description=__doc__,
    )
    count = whole_number()
    out.add_argument(
        "-n", "-np", "--np", "--nproc", "--ntasks", dest="n", type=count, metavar="N",
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
    out.epilog = (
        "COMMAND's first word python or python3 means the Python that runs this, on all hosts; a "
        f"path means itself. {JOB_START}, where a job script has not set it, is the time of this "
        "launch."
    )
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        options, command = split(sys.argv[1:] if argv is None else argv)
        arguments = parser().parse_args(options)
        layout = place(arguments, command)
        if not arguments.print:  # before the line: Open MPI's names the variables to pass on
            os.environ.setdefault(JOB_START, f"{time.time():.3f}")
        launcher = find_launcher(layout, os.environ)
        if command[0] in ("python", "python3"):
            command = [sys.executable, *command[1:]]
        print(f"launch: {layout}", file=sys.stderr, flush=True)
        if arguments.restarts and not arguments.print:
            limits = arguments.restarts, arguments.give_up_after
            sys.exit(Supervisor(layout, launcher, command, *limits).run())
        line = [*launcher(layout, os.environ), *command]
        if arguments.print:
            print(shlex.join(line))
            return
        print(f"launch: {shlex.join(line)}", file=sys.stderr, flush=True)
    os.execvp(line[0], line)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options, and the command: behind `--`, or from the first other word on."""
    if "--" in argv:
        place = argv.index("--")
        return argv[:place], argv[place + 1 :]
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        alone = argv[place] in ("--print", "-h", "--help") or "=" in argv[place]
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
    if not command:
        raise UsageError(
            "COMMAND: nothing to start; put it behind --, such as: python -m jaxgpt.launch -- "
            "python -m jaxgpt.train"
        )
    if arguments.spare_nodes and not arguments.restarts:
        raise UsageError(
            f"--spare-nodes={arguments.spare_nodes}: nothing takes a spare host's turn without "
            "--restarts R; give it too"
        )
    return place_processes(
        arguments.n, arguments.ppn, arguments.hosts, os.environ, arguments.spare_nodes
    )


if __name__ == "__main__":
    main()
