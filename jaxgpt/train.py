"""Train a GPT: `python -m jaxgpt.train [--config NAME] [--mesh D,F,T] [section.key=value ...]`.

Under `mpiexec -n N` the N processes are one job. With no argument a small GPT is trained on the
source of Python's standard library. `--help` lists every key.
"""

import sys

from jaxgpt.distributed.malloc import notes, tune_malloc

if __name__ == "__main__":
    tune_malloc()  # before the other imports, which a new start would repeat

# ruff: noqa: E402
from jaxgpt.config import is_help, mesh_sizes, parse_args
from jaxgpt.distributed.backend import connect
from jaxgpt.distributed.cluster import INIT_TIMEOUT, attempt, join_cluster
from jaxgpt.distributed.compile_cache import use_compile_cache
from jaxgpt.distributed.environment import guessed_rank
from jaxgpt.distributed.exits import StopSignal, exits_together
from jaxgpt.telemetry.startup import Startup
from jaxgpt.training.run_directory import prepare_run


def main(argv: list[str] | None = None) -> None:
    startup = Startup()
    argv = sys.argv[1:] if argv is None else argv
    with exits_together():
        if is_help(argv):  # before MPI, and once
            if guessed_rank() == 0:
                parse_args(argv)
            return
        config, error = attempt(parse_args, argv)
        startup.mark("imports")
        cluster = join_cluster(config.init_timeout if config else INIT_TIMEOUT)
        cluster.agree(error)
        startup.mark("distributed init")
        run = prepare_run(config, cluster)
        startup.mark("data")
        stop = StopSignal(config.train.time_limit, startup.elapsed())
        facts = connect(cluster, mesh_sizes(run.config), startup.mark, stops_at_steps=True)
        facts["notes"] += [use_compile_cache(config.compile_cache, cluster), *notes()]
        from jaxgpt.training.loop import train  # imports JAX, which has to come after connect

        startup.mark("imports")
        status = train(run, cluster, facts, stop, startup)
    sys.exit(status)


if __name__ == "__main__":
    main()
