#!/usr/bin/env bash
# The checks that need a GPU, in one command and under 10 minutes; prints a table.
# Without a GPU it says so and exits 0. `tests/gpu/run.sh --device cpu` tries the checks themselves.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # without it cuBLAS may sum in another order each time
PYTHONPATH=. exec "$python" -m tests.gpu.checks "$@"
