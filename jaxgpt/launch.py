"""Start a command on all hosts of the job with mpiexec or srun.

`python -m jaxgpt.launch -- python -m jaxgpt.train ...` finds the hosts of the PBS or Slurm job (or
uses only this host), detects the machine and its launcher, prints the command line and executes it.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import time

from jaxgpt.cluster.environment import JOB_START, find_launch
from jaxgpt.cluster.launch_line import LAUNCH_LINE, LAUNCH_PREFIX, words_before_python
from jaxgpt.cluster.launchers import (
    ProcessLayout,
    find_launcher,
    place_processes,
    placement_lines,
)
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.cluster.supervisor import Supervisor
from jaxgpt.config import (
    CommandParser,
    UsageError,
    devices_per_process,
    is_help,
    mesh_shape,
    parse_args,
    whole_number,
)

TRAIN = "jaxgpt.train"
ONE_WORD = re.compile("--print|-h|--help|-.*=.*|-n[0-9].*|-f.+")  # options without a next word


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
        help="total number of processes; default: P per host",
    )  # fmt: skip
    ppn = "processes per host; default: N divided evenly, else one per device, else one"
    same = ("-ppn", "--nproc-per-node", "--ntasks-per-node")  # for mpiexec, torchrun, srun
    out.add_argument("--ppn", *same, type=count, metavar="P", help=ppn)
    out.add_argument(
        "--hosts", "-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile", metavar="FILE",
        help="file with one host per line (host, host:4 or host slots=4); default: the hosts in "
        "PBS_NODEFILE, Slurm's allocation or HOSTFILE, else this host",
    )  # fmt: skip
    out.add_argument(
        "--restarts",
        type=whole_number(0),
        metavar="R",
        default=0,
        help="restart COMMAND up to R times if a process fails or hangs, or if a host is lost",
    )
    out.add_argument(
        "--give-up-after",
        type=whole_number(0),
        metavar="N",
        default=3,
        help="give up after N attempts in a row without a new checkpoint; 0: never; default: 3",
    )
    out.add_argument(
        "--spare-nodes",
        type=whole_number(0),
        metavar="K",
        default=0,
        help="keep the last K hosts free to replace hosts that fail",
    )
    printed = (
        "only print the command line, and the host and devices of each rank; if COMMAND runs "
        f"{TRAIN}, also check its settings"
    )
    out.add_argument("--print", action="store_true", help=printed)
    out.epilog = (
        "If COMMAND starts with python or python3, all hosts use the Python that runs "
        f"jaxgpt.launch. A path to Python is left unchanged. {JOB_START} is set to the current "
        "time if the job script has not set it."
    )
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        options, command = split(sys.argv[1:] if argv is None else argv)
        arguments = parser().parse_args(options)
        layout = make_layout(arguments, command)
        if not arguments.print:  # the Open MPI command line built below lists these variables
            os.environ.setdefault(JOB_START, f"{time.time():.3f}")
            words = ["python", "-m", "jaxgpt.launch", *options, "--", *words_before_python(command)]
            os.environ[LAUNCH_PREFIX] = f"{shlex.join(words)} "
        launcher, name = find_launcher(layout, os.environ)
        if command[0] in ("python", "python3"):
            command = [sys.executable, *command[1:]]
        print(f"launch: {layout}", file=sys.stderr, flush=True)
        print(f"launch: using {name}", file=sys.stderr, flush=True)
        if arguments.restarts or arguments.print:
            check_settings(command, layout.n_processes, arguments.restarts)
        if arguments.restarts and not arguments.print:
            limits = arguments.restarts, arguments.give_up_after
            sys.exit(Supervisor(layout, launcher, command, *limits).run())
        line = [*launcher(layout, os.environ), *command]
        if arguments.print:
            for place in placement_lines(layout, os.environ):
                print(f"launch: {place}", file=sys.stderr, flush=True)
            print(shlex.join(line))
            return
        os.environ[LAUNCH_LINE] = shlex.join(line)
        print(f"launch: {shlex.join(line)}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the launcher would inherit Python's SIG_IGN
    os.execvp(line[0], line)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options and the command.

    The command starts at the first word that is neither an option nor an option's value, or after
    a `--` before this word. All options except --print, -h and --help take a value, either in the
    same word (--np=8, -n8, -fFILE) or as the next word. If there is no command, the second list is
    empty.
    """
    end = 0
    while end < len(argv) and argv[end].startswith("-") and argv[end] != "--":
        end += 1 if ONE_WORD.fullmatch(argv[end]) else 2
    command = argv[end:]
    return argv[:end], command[1:] if command[:1] == ["--"] else command


def check_settings(command: list[str], n_processes: int, restarts: int) -> None:
    """Raise `UsageError` if `parse_args` rejects the settings that follow jaxgpt.train in COMMAND.

    Also raises `UsageError` if the devices of the mesh cannot be divided among the processes, or if
    `restarts` is not 0 and a restart could not continue the run. Nothing is checked if COMMAND does
    not contain the word jaxgpt.train, or if help is requested.
    """
    if TRAIN not in command or is_help(argv := command[command.index(TRAIN) + 1 :]):
        return
    from jaxgpt.optim import CHOICES
    from jaxgpt.train.init_from import initial_model
    from jaxgpt.train.resume import saved_settings

    config = parse_args(
        argv,
        prog=f"{os.environ.get(LAUNCH_PREFIX, '')}python -m {TRAIN}",
        initial_model=initial_model,
        saved_settings=saved_settings,
        choices=CHOICES,
        counts_devices_later=True,
    )
    shape = mesh_shape(config)
    if shape.is_filled:
        devices_per_process(shape, n_processes)
    if restarts and config.out is None:
        raise UsageError(
            f"--restarts={restarts}: each restart would begin a new run; also give --out DIR"
        )
    if restarts and not config.checkpoint.resume:
        raise UsageError(
            f"checkpoint.resume=False: --restarts={restarts} could not continue the run; leave out "
            "one of them"
        )


def make_layout(arguments: argparse.Namespace, command: list[str]) -> ProcessLayout:
    """Return the hosts of the job and the number of processes on each host.

    Raises `UsageError` if COMMAND is missing or starts with `jaxgpt.`, if --spare-nodes is given
    without --restarts, or if a launcher started this process.
    """
    launch = find_launch(os.environ)
    if launch.variable is not None:
        raise UsageError(
            f"{launch.variable}: this process was itself started by a launcher "
            f"({launch.launcher}); run jaxgpt.launch once, from the job script or a shell (under "
            "Slurm, a shell started by salloc, not srun)"
        )
    if not command:
        raise UsageError(
            "COMMAND: is missing; put it after --, as in: python -m jaxgpt.launch -- "
            "python -m jaxgpt.train"
        )
    if command[0].startswith("jaxgpt."):
        raise UsageError(f"{command[0]}: is not a program; use python -m {command[0]}")
    if arguments.spare_nodes and not arguments.restarts:
        raise UsageError(
            f"--spare-nodes={arguments.spare_nodes}: only restarts use spare hosts; also give "
            "--restarts R"
        )
    return place_processes(
        arguments.n, arguments.ppn, arguments.hosts, os.environ, arguments.spare_nodes
    )


if __name__ == "__main__":
    main()
