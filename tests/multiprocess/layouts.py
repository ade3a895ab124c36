"""What a layout must not change, for each mesh given: `layouts.py STEPS MESH... -- ARGUMENTS`.

Process 0 prints one line of JSON: mesh -> what `jobs.trace` returns.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxgpt.config import load_config, mesh_sizes
from jaxgpt.distributed.backend import connect
from jaxgpt.distributed.cluster import join_cluster
from jaxgpt.distributed.compile_cache import use_compile_cache
from jaxgpt.distributed.exits import exits_together

with exits_together():
    split = sys.argv.index("--")
    n_steps, meshes, arguments = int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
    cluster = join_cluster()
    config = load_config(*arguments, "--mesh", meshes[0])
    connect(cluster, mesh_sizes(config))
    use_compile_cache(config.compile_cache, cluster)
    from jobs import trace

    found = {mesh: trace(n_steps, *arguments, "--mesh", mesh) for mesh in meshes}
    if cluster.is_main:
        print("found " + json.dumps(found))
