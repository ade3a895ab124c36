#!/usr/bin/env bash
# Installs jaxgpt into .venv and trains a small GPT with 8 processes: data parallelism over 2 groups
# of 4 tensor-parallel devices. Arguments are passed to the trainer:
#   bash launch/quickstart.sh train.max_iters=100
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/launch/install.sh" mpi
export PATH="$root/.venv/bin:$PATH"
exec mpiexec -n 8 python -m jaxgpt.train --mesh 2,1,4 "$@"
