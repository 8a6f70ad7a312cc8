"""The charts of a report: which numbers belong together, and what each of them says."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chart:
    """One chart, with a line that says what it is.

    Attributes:
        group: heading under which it stands.
        keys: of the numbers that it shows; as a pattern, they match the whole key.
    """

    group: str
    title: str
    what: str
    keys: tuple[str, ...]


REWARD, POLICY, LENGTHS, VALUE = "Reward", "Policy", "Lengths", "Value"
TIME, EVALUATION, OTHER = "Time and memory", "Evaluation", "Other"
SOURCE = "[^/]+(?:/[^/]+)*"  # name of a reward, which may be a path

# A number goes to the first chart that has its key; `OTHER` takes what is left, a chart each.
CATALOGUE = (
    Chart(
        REWARD,
        "Reward by source",
        "What is trained on, and the mean raw score of each source. It should rise, then flatten.",
        ("reward", f"rewards/{SOURCE}/mean", "rewards/greedy"),
    ),
    Chart(
        REWARD,
        "Spread of scores",
        "Standard deviation among the completions of one prompt, and of each source over all.",
        ("reward_std", f"rewards/{SOURCE}/std"),
    ),
    Chart(
        REWARD,
        "Groups with one score for all",
        "Share of completions whose prompt has one score for all: nothing is learnt from them.",
        ("frac_reward_zero_std",),
    ),
    Chart(
        REWARD,
        "Failed rewards",
        "Share of calls of a reward function that failed.",
        (f"rewards/{SOURCE}/failed",),
    ),
    Chart(
        POLICY,
        "KL to the reference",
        "How far the policy has moved from the model it began as, in nats per token.",
        ("kl",),
    ),
    Chart(
        POLICY,
        "KL of a completion",
        "How far the policy has moved, summed over the tokens of a completion, in nats.",
        ("kl/completion",),
    ),
    Chart(
        POLICY,
        "KL of the update",
        "How far one step moves the policy, in nats per token. Far above 0.01 is a large step.",
        ("approx_kl", "approx_kl/after"),
    ),
    Chart(
        POLICY,
        "Entropy",
        "How undecided the policy is, in nats per token. At 0 it always says the same.",
        ("entropy",),
    ),
    Chart(
        POLICY,
        "Clipping",
        "Share of tokens whose ratio to the old policy was clipped, and which then do not count.",
        ("clip_ratio/.*",),
    ),
    Chart(
        POLICY,
        "Gradient norm",
        "Length of the gradient before clipping. Single peaks are normal, a steady rise is not.",
        ("grad_norm",),
    ),
    Chart(
        POLICY,
        "Loss",
        "The loss, and the policy's part of it. Its level says little: look at the reward.",
        ("loss", "policy_loss", "train_loss"),
    ),
    Chart(
        POLICY,
        "Ratio",
        "Mean probability of a token under the new policy by that under the old one: near 1.",
        ("ratio",),
    ),
    Chart(
        POLICY,
        "Sampler and policy apart",
        "Difference between the engine's log-probabilities and the policy's, in nats. Rounding is "
        "below 0.1.",
        ("sampling/sampling_logp_difference/.*",),
    ),
    Chart(
        POLICY,
        "Ratio of policy and sampler",
        "Probability of a token under the policy by that under the engine: near 1.",
        ("sampling/importance_sampling_ratio/.*",),
    ),
    Chart(
        POLICY,
        "Learning rate",
        "The rates that the optimizer used.",
        ("learning_rate", "value_learning_rate"),
    ),
    Chart(
        POLICY,
        "Coefficients",
        "Weights of the KL and of the entropy, which controllers may move.",
        ("beta", "entropy_coef", "old_kl_coef", "learning_rate_scale"),
    ),
    Chart(
        LENGTHS,
        "Length of completions",
        "Tokens of a completion: mean, shortest and longest of the step.",
        ("completions/(mean|min|max)_length",),
    ),
    Chart(
        LENGTHS,
        "Truncated",
        "Share of completions that were cut off at max_completion_length.",
        ("completions/clipped_ratio",),
    ),
    Chart(
        LENGTHS,
        "Turns and tools",
        "Turns of an episode, calls of tools, and how many of them failed.",
        ("episodes/.*", "tools/.*"),
    ),
    Chart(
        VALUE,
        "Value loss",
        "Squared error of the critic. It should fall, then follow the reward's variance.",
        ("value_loss",),
    ),
    Chart(
        VALUE,
        "Explained variance",
        "How much of the returns' variance the critic foresees: 1 is all, below 0 is worse than a "
        "constant.",
        ("explained_variance",),
    ),
    Chart(VALUE, "Clipped values", "Share of values that were clipped.", ("value_clip_ratio",)),
    Chart(
        TIME,
        "Time by stage",
        "Seconds of a step, and of its stages.",
        ("step_time", "time/.*"),
    ),
    Chart(
        TIME,
        "Speed",
        "Tokens of prompts and completions per second, over the whole step.",
        ("perf/tokens_per_second",),
    ),
    Chart(TIME, "Memory", "Memory of the accelerator, in GB.", ("memory/.*",)),
    Chart(
        TIME,
        "Updates",
        "Updates of the step, and those skipped because they were not finite.",
        ("num_updates", "skipped_updates"),
    ),
    Chart(
        EVALUATION,
        "Held-out reward",
        "Reward on held-out prompts, sampled and greedy.",
        ("eval_(.*_)?reward",),
    ),
    Chart(
        EVALUATION,
        "Held-out scores by source",
        "Mean raw score of each source on held-out prompts.",
        ("eval_.*rewards/.*/mean",),
    ),
    Chart(
        EVALUATION,
        "Several attempts",
        "Share of held-out prompts solved by one of k completions, and by the majority of n.",
        ("eval_.*(pass@|majority@).*",),
    ),
    Chart(
        EVALUATION,
        "Held-out length",
        "Mean tokens of a completion on held-out prompts.",
        ("eval_.*completions/mean_length",),
    ),
)
NO_CURVES = {"step", "num_tokens"}  # they are the axes


def charts_of(keys: Iterable[str]) -> list[Chart]:
    """Return the charts of these numbers, in order; each number is in one of them."""
    left = [key for key in keys if key not in NO_CURVES]
    charts = []
    for chart in CATALOGUE:
        own = _matching(left, chart.keys)
        if own:
            charts.append(replace(chart, keys=tuple(own)))
            left = [key for key in left if key not in own]
    return [*charts, *(_other(key) for key in sorted(left))]


def _matching(keys: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the keys that match, by the first pattern that each matches."""
    found: list[str] = []
    for pattern in patterns:
        found += [key for key in keys if key not in found and re.fullmatch(pattern, key, re.DOTALL)]
    return found


def _other(key: str) -> Chart:
    what = "On held-out prompts." if key.startswith("eval_") else "A number that the run logged."
    return Chart(OTHER, key, what, (key,))
