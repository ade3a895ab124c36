#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them. Arguments go to pytest:
#   bash launch/test.sh --long      # also the long forms of the checks (an hour or more)
#   bash launch/test.sh -k mesh
# Tests that read files of torch.save are skipped without torch: .venv/bin/pip install torch
# Four files are tested at a time, as two leave a core idle for a quarter of the time, in which jobs
# wait for something; -n 0 tests one, with what it prints (-s) and debuggers.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/launch/install.sh" dev
export PATH="$root/.venv/bin:$PATH"
cd "$root"
exec python -m pytest -n 4 "$@"
