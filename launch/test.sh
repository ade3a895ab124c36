#!/usr/bin/env bash
# Installs the tests' dependencies into .venv and runs the tests. Arguments are passed to pytest:
#   bash launch/test.sh --long      # also run the long checks (an hour or more)
#   bash launch/test.sh -k mesh
# Tests that read files written by torch.save need torch: .venv/bin/pip install torch
# Four files are tested in parallel. With only two, a core would be idle for a quarter of the time,
# because some tests wait. -n 0 tests one file at a time, so that debuggers and -s work.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/launch/install.sh" dev
export PATH="$root/.venv/bin:$PATH"
cd "$root"
exec python -m pytest -n 4 "$@"
