#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN="${machines[0]}" PORT=$((20000 + SLURM_JOB_ID % 10000))

# In quotes, for each machine to fill in its own SLURM_NODEID.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
  accelerate launch --config_file recipes/accelerate/zero2.yaml \
    --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN" --main_process_port "$PORT" \
    recipes/grpo.py --config my.yaml --output_dir "runs/$SLURM_JOB_ID"'
