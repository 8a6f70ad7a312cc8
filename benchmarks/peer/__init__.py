"""Whole training steps of this library beside TRL's, by hand: both sides in turn, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.peer short [--vocabulary 32768] [--methods grpo]
    OMP_NUM_THREADS=1 python -m benchmarks.peer shared --family qwen3_5_text --methods grpo

The workloads are `short`, `shared` and `long` (`workload.py`); the methods `grpo` without a KL,
`grpo_kl` with one of 0.05 in the loss, and `rloo` with one in the reward. Both sides start from the
same model of width 256 and 6 layers with random weights (`--family`: Qwen2, Qwen3.5 with gated
delta nets, or GPT-OSS with windows, sinks and experts), have the same prompts, the same lengths of
completions (drawn from a quarter of the longest up, EOS is forced at them and nowhere else), the
same cheap reward and learning rate, and make one update per rollout, without gradient
checkpointing. This library has its default micro-batches; TRL the fastest of `--batches`, each
timed once before the rounds. A round is a step of TRL's `train()` and then one of ours.

Printed are, of each method:

- the median seconds of a step and of its phases on both sides, where "score" is whatever lies
  between the reward and the update, and the ratio of TRL's to ours. On a GPU the phases end where
  they are left, not where the device is done; the whole step waits for it.
- the peak memory above imports and the loaded policy, each side in a process of its own that takes
  two steps: resident memory, or on a GPU that of tensors. A reference counts as used memory.
- how far the two gradients are apart on one identical batch: the norm of their difference over the
  norm of TRL's.

On a GPU the same command runs there; `--dtype bfloat16`, `--width` and `--layers` are for it.
"""
