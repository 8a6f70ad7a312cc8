#!/usr/bin/env bash
# What only a GPU can show, in one command and within an hour; prints a table, writes gpu_report.json.
# Without a GPU it says so and exits 0. `tests/gpu/run.sh --device cpu` tries the checks themselves,
# `--only bfloat16 memory` runs some groups, `--check llama` the checks whose names match; `--minutes 15`
# ends sooner, and below 20 takes two architectures: the least sure come first, speed before presets.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # without it cuBLAS may sum in another order each time
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m tests.gpu.checks "$@"
