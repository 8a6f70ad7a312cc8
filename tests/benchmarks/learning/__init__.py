r"""Time to a score, by hand: GRPO and RLOO of this library beside TRL's, on tasks of a tiny model.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.learning --out runs/learning --tune --seeds 5 \
        --picture docs/learning.png

Both sides start from the same warm-started weights and are given the same prompts in the same
order, as many completions of each, the same longest completion, budget of samples, reward and
schedule (a short warm-up, then a constant rate); whatever else is a default of each. `--tune` finds
each side's own learning rate, with a seed that is not measured, and TRL's fastest number of
completions per forward pass; this library has its automatic micro-batches. Without it, both have
the rate of the recipes. The choices are kept in `settings.json`.

Every `--every` steps one function scores the weights of either side by a completion of each of the
same held-out prompts, sampled with the same noise. (The warm-started models are right far more
often when greedy, 97 % of the sums of `arithmetic`: `--temperature 0` shows little to learn.) Its
time does not count; everything else from the first step to the last does.

Each run has a process of its own and writes one file of JSON lines: the settings; per step the
tokens sampled, seconds of the step and its rollout, entropy, and the share of tokens that repeat
(`watch.py`); per evaluation the samples, the seconds and the score. A finished run is not made
again.

Printed are the samples and the seconds to the score (at the first evaluation that reaches it) and
the last score: the median over seeds and the range.
"""
