"""Train a GPT: `python -m jaxgpt.train [--config NAME] [--mesh D,F,T] [section.key=value ...]`.

Under `mpiexec -n N` the N processes are one job. With no argument a small GPT is trained on the
source of Python's standard library. `--help` lists every key.
"""

import functools
import sys

from jaxgpt.cluster.environment import rank_from_env
from jaxgpt.cluster.preemption import StopSignal
from jaxgpt.cluster.process_group import INIT_TIMEOUT, catch_usage_error, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import is_help, mesh_shape, parse_args
from jaxgpt.perf.startup import Startup
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax, preemption_sync_point
from jaxgpt.runtime.jax_internals import failure_board
from jaxgpt.train.resume import initial_model
from jaxgpt.train.run_directory import prepare_run


def main(argv: list[str] | None = None) -> None:
    startup = Startup()
    argv = sys.argv[1:] if argv is None else argv
    parse = functools.partial(parse_args, initial_model=initial_model)
    with job_exit_handler(failure_board):
        if is_help(argv):  # before MPI, and once
            if rank_from_env() == 0:
                parse_args(argv)
            return
        config, error = catch_usage_error(parse, argv)
        startup.mark("imports")
        cluster = join_process_group(config.init_timeout if config else INIT_TIMEOUT)
        cluster.raise_if_any(error)
        startup.mark("distributed init")
        run = prepare_run(config, cluster)
        startup.mark("data")
        stop = StopSignal(config.train.time_limit, startup.elapsed(), preemption_sync_point)
        facts = initialize_jax(cluster, mesh_shape(run.config), startup.mark, preemption=True)
        facts["notes"].append(use_compile_cache(config.compile_cache, cluster))
        from jaxgpt.train.loop import train  # imports JAX, which has to come after initialize_jax

        startup.mark("imports")
        with cluster.name_lost_peers():
            status = train(run, cluster, facts, stop, startup)
    sys.exit(status)


if __name__ == "__main__":
    main()
