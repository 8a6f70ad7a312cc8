#!/bin/bash
# One server for rollouts on a machine with 8 GPUs: four copies of the model on two GPUs each. It
# takes all weights of one run; the arguments are the model, and more flags of vLLM.
set -euo pipefail
export VLLM_SERVER_DEV_MODE=1
exec vllm serve "$@" --logprobs-mode processed_logprobs --tensor-parallel-size 2 \
  --data-parallel-size 4 --api-server-count 1 --host 0.0.0.0 --port 8000
