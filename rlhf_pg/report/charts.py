"""The charts of a report: which numbers belong together, and what each of them says."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

# A line for each chart: its title, patterns of its keys, and what it shows. A number goes to the
# first chart that has its key; "Other" takes what is left, a chart each.
CATALOGUE = """
# Reward
Reward by source | reward rewards/*/mean rewards/greedy | Weighted total, and raw mean by source.
Spread of scores | reward_std rewards/*/std | Standard deviation within groups, and by source.
Groups with one score for all | frac_reward_zero_std | Nothing is learnt from these groups.
Failed rewards | rewards/*/failed | Share of calls of a reward function that failed.
# Policy
KL to the reference | kl | Distance from the initial model, in nats per token.
KL of a completion | kl/completion | Summed over the tokens of a completion, in nats.
KL of the update | approx_kl approx_kl/after | How far one step moves; far above 0.01 is large.
Entropy | entropy | In nats per token; at 0 the policy always says the same.
Clipping | clip_ratio/* | Share of tokens whose ratio was clipped, and which then do not count.
Gradient norm | grad_norm | Before clipping. Single peaks are normal, a steady rise is not.
Loss | loss policy_loss train_loss | Its level says little: look at the reward.
Ratio | ratio | Mean probability under the new policy by that under the old one: near 1.
Sampler and policy apart | agreement/* sampling/sampling_logp_difference/* | In nats per token.
Ratio of policy and sampler | sampling/importance_sampling_ratio/* | Near 1.
Learning rate | learning_rate value_learning_rate | The rates that the optimizer used.
Coefficients | beta entropy_coef old_kl_coef learning_rate_scale | Controllers may move them.
# Lengths
Length of completions | completions/mean_length completions/m??_length | Tokens of a completion.
Truncated | completions/clipped_ratio | Share that was cut off at max_completion_length.
Turns and tools | episodes/* tools/* | Turns, calls of tools, and how many of them failed.
# Value
Value loss | value_loss | Squared error of the critic.
Explained variance | explained_variance | 1 is all, below 0 is worse than a constant.
Clipped values | value_clip_ratio | Share of values that were clipped.
# Time and memory
Time by stage | step_time time/* | Seconds of a step, and of its stages.
Speed | perf/tokens_per_second | Tokens of prompts and completions, over the whole step.
Memory | memory/* | Memory of the accelerator, in GB.
Updates | num_updates skipped_updates | Updates of the step, and those that were not finite.
# Evaluation
Held-out reward | eval_reward eval_*_reward | On held-out prompts, sampled and greedy.
Held-out scores by source | eval_*rewards/*/mean | Mean raw scores on held-out prompts.
Several attempts | eval_*pass@* eval_*majority@* | Share solved by one of k, and by the majority.
Held-out length | eval_*completions/mean_length | Mean tokens of a completion.
"""
NO_CURVES = {"step", "num_tokens"}  # they are the axes


@dataclass(frozen=True)
class Chart:
    """One chart: the heading under which it stands, its title, what it shows, and its keys."""

    group: str
    title: str
    what: str
    keys: tuple[str, ...]


def charts_of(keys: Iterable[str]) -> list[Chart]:
    """Return the charts of these numbers, in order; each number is in one of them."""
    left = [key for key in keys if key not in NO_CURVES]
    charts, group = [], ""
    for line in CATALOGUE.strip().splitlines():
        if line.startswith("# "):
            group = line.removeprefix("# ")
            continue
        title, patterns, what = line.split(" | ")
        own: list[str] = []
        for pattern in patterns.split():
            own += [key for key in left if key not in own and fnmatch.fnmatchcase(key, pattern)]
        if own:
            charts.append(Chart(group, title, what, tuple(own)))
            left = [key for key in left if key not in own]
    other = [Chart("Other", key, "A number that the run logged.", (key,)) for key in sorted(left)]
    return [*charts, *other]
