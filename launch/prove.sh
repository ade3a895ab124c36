#!/usr/bin/env bash
# Checks a machine, especially its GPU. Reports speed, numerics, resuming and memory in a table.
#   bash launch/prove.sh [--minutes 25] [--out DIR] [--nanogpt DIR] [--torch PYTHON] [CHECK ...]
# Needs neither an installation nor MPI, but the dependencies must be importable (PYTHONPATH).
# PYTHON=... selects the interpreter. The default is the one in .venv if there is one, else python3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m jaxgpt.doctor prove "$@"
