#!/usr/bin/env bash
# Creates .venv in the project folder and installs jaxgpt with one extra and pinned versions.
#   bash launch/install.sh mpi|dev
# PYTHON=... selects the interpreter. The default is the first Python found that is new enough.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: bash launch/install.sh mpi|dev}

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if [ ! -x .venv/bin/pip ]; then
    candidates=(python3 python3.13 python3.12 python3.11)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for python in "${candidates[@]}"; do
        "$python" -c "$new_enough" 2>/dev/null && break
        python=
    done
    if [ -z "${python:-}" ]; then
        echo "jaxgpt needs Python 3.11 or newer: set PYTHON to such an interpreter" >&2
        exit 2
    fi
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "$python cannot create virtual environments (Debian: apt-get install python3-venv)" >&2
        exit 2
    fi
fi

# Do nothing if this extra is already installed with the same versions.
wanted="$extra $(cat pyproject.toml launch/pins.txt | cksum)"
stamp=.venv/jaxgpt-$extra
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    start=$SECONDS
    echo "installing jaxgpt[$extra] into .venv: this takes up to 3 minutes"
    .venv/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-compile \
        --constraint launch/pins.txt --editable ".[$extra]" |
        awk '/^(Collecting|Installing collected)/ { print substr($0, 1, 79); fflush() }'
    # Compile on all cores, because pip uses only one. Ignore errors, because some packages contain
    # files for other versions of Python.
    echo "compiling the installed packages"
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
    echo "installed in $((SECONDS - start)) s"
    echo "$wanted" >"$stamp"
fi
