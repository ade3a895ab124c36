"""Hash the batches that the devices of a job receive: `batches.py STEPS MESH... -- ARGUMENTS`.

Process 0 prints one line of JSON: mesh -> SHA-256 of the batches of steps 1 to STEPS. Three loaders
read them in turn, as if the run had been restarted twice. The first leaves out a range of steps, as
if they were skipped; the last reads these steps at the end.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxgpt.cluster.process_group import join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import load_config, mesh_shape
from jaxgpt.data.dataset import open_dataset
from jaxgpt.runtime.initialize import initialize_jax


def digest_of(config, cluster, steps):
    import jax
    import numpy as np

    from jaxgpt.data.loader import Loader
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.parallel.sharding import batch_sharding

    sharding = batch_sharding(make_mesh(mesh_shape(config, jax.device_count()), cluster.hosts))
    dataset = open_dataset(config.data, config.model)

    def loader():
        return Loader.for_training(dataset, config, sharding)

    rows = {}
    third = steps // 3
    skipped = range(third // 2, third)
    parts = [
        [step for step in range(1, third + 1) if step not in skipped],
        list(range(third + 1, 2 * third + 1)),
        [*range(2 * third + 1, steps + 1), *skipped],
    ]
    for part in parts:
        for step, batch in zip(part, loader().batches(part), strict=True):
            for shard in batch.addressable_shards:
                first = shard.index[0].start or 0
                for row, tokens in enumerate(np.asarray(shard.data), first):
                    found = hashlib.sha256(tokens.tobytes()).hexdigest()
                    assert rows.setdefault(f"{step} {row}", found) == found
    whole = {}
    for of_process in cluster.allgather(rows):
        for key, found in of_process.items():
            assert whole.setdefault(key, found) == found, key
    digest = hashlib.sha256()
    for step in range(1, steps + 1):
        for row in range(config.train.batch_size):
            digest.update(whole[f"{step} {row}"].encode())
    return digest.hexdigest()


if __name__ == "__main__":
    with job_exit_handler():
        split = sys.argv.index("--")
        n_steps, meshes, arguments = int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
        cluster = join_process_group()
        initialize_jax(cluster, mesh_shape(load_config(*arguments, "--mesh", meshes[0])))
        found = {
            mesh: digest_of(load_config(*arguments, "--mesh", mesh), cluster, n_steps)
            for mesh in meshes
        }
        if cluster.is_main:
            print("found " + json.dumps(found))
