#!/usr/bin/env bash
# Proves a machine, above all one with a GPU: speed, numerics, resumption, memory, in a table.
#   bash launch/prove.sh [--minutes 25] [--out DIR] [--nanogpt DIR] [--torch PYTHON] [CHECK ...]
# Needs no installation: packages that can be imported are enough (PYTHONPATH), and no MPI.
# PYTHON=... names the interpreter; without it .venv's, if there is one, else python3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m jaxgpt.doctor prove "$@"
