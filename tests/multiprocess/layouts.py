"""Results that must not depend on the mesh: `layouts.py STEPS MESH... -- ARGUMENTS`.

Process 0 prints one line of JSON: mesh -> what `jobs.trace` returns.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import load_config, mesh_shape
from jaxgpt.runtime.compile_cache import use_compile_cache
from jaxgpt.runtime.initialize import initialize_jax

with job_exit_handler():
    split = sys.argv.index("--")
    n_steps, meshes, arguments = int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
    cluster = join_process_group()
    config = load_config(*arguments, "--mesh", meshes[0])
    initialize_jax(cluster, mesh_shape(config))
    use_compile_cache(config.compile_cache, cluster)
    from jobs import trace

    found = {mesh: trace(n_steps, *arguments, "--mesh", mesh) for mesh in meshes}
    if cluster.is_main:
        print("found " + json.dumps(found))
