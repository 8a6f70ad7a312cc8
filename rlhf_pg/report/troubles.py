"""Known troubles in the curves of a run: their kind, their first step and a remedy.

Each rule uses the mean over a window of steps, so that a single bad step is not reported, and
skips steps in which its metric was not computed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeGuard

WINDOW = 10  # steps

Line = Mapping[str, Any]
Points = list[tuple[int, float]]  # step, value


@dataclass(frozen=True)
class Trouble:
    """A stretch of a curve with a known trouble."""

    key: str  # the metric whose curve shows it
    step: int  # first step
    until: int | None  # last step; None if it goes on
    title: str
    text: str  # explanation and remedy


def troubles(lines: Sequence[Line]) -> list[Trouble]:
    """Return the troubles of a run, from the lines of its steps; the earliest first."""
    entropy, kl, norms = (values(lines, key) for key in ("entropy", "kl", "grad_norm"))
    first_entropy = fmean(x for _, x in entropy[:WINDOW]) if len(entropy) > WINDOW else 0.0
    usual_kl = median(x for _, x in kl[: max(WINDOW, len(kl) // 2)]) if kl else 0.0
    usual_norm = median(x for _, x in norms) if norms else 0.0
    length = "completions/mean_length"
    rules: list[tuple[str, Points | None, Callable[[float], bool], str, str]] = [
        (
            *("entropy", entropy, lambda mean: mean < 0.05 * first_entropy, "Entropy collapse"),
            "Below 5% of what it was: the completions of a prompt are nearly the same, so little "
            "more can be learnt. If the reward is not yet good, begin again with entropy_coef, a "
            "larger epsilon_high or a smaller learning rate.",
        ),
        (
            *("kl", kl, lambda mean: mean > max(0.5, 4 * usual_kl), "KL explosion"),
            "The policy has left its reference far behind, often to exploit the reward: read the "
            "completions. Use a larger beta, a smaller learning rate, or an earlier checkpoint.",
        ),
        (
            *("approx_kl", None, lambda mean: mean > 0.1, "Steps too large"),
            "One step moves the policy further than its clipping assumes. Use a smaller learning "
            "rate, fewer num_iterations, or target_kl.",
        ),
        (
            *("frac_reward_zero_std", None, lambda mean: mean >= 0.9, "All groups equal"),
            "Nearly every prompt has one score for all its completions, from which group baselines "
            "learn nothing: the prompts are too easy or too hard, or the reward has too few steps.",
        ),
        (
            *("completions/clipped_ratio", None, lambda x: x >= 0.9, "Everything truncated"),
            "Nearly no completion ends by itself. Check that the model knows its stop token and "
            "chat template, or raise max_completion_length; missing_eos_penalty rewards ending.",
        ),
        (
            *(length, *_paid_lengths(lines, length), "Reward up while length runs away"),
            "Completions are over twice as long as at first, and the reward rises with them. Check "
            "in the token view that length itself is not what is paid; overlong_buffer or a reward "
            "of length holds it back.",
        ),
        (
            *("grad_norm", norms, lambda mean: mean > 50 * usual_norm > 0, "Gradients explode"),
            "The gradient is far longer than it usually is. Use a smaller learning rate or "
            "max_grad_norm, and look at the longest completions.",
        ),
        (
            *("explained_variance", values(lines, "explained_variance")[2 * WINDOW :]),
            *(lambda mean: mean < 0, "The critic foresees nothing"),
            "Its values are worse than a constant, and add noise to the advantages. Raise "
            "value_learning_rate or vf_coef, or train the critic alone at first.",
        ),
    ]
    found = []
    for key, points, is_bad, title, text in rules:
        points = values(lines, key) if points is None else points
        if stretch := _stretch(points, is_bad):
            found.append(Trouble(key, *stretch, title, text))
    text = "`rlhf-pg replay RUN --step N` shows the completions of such a step."
    skipped = [step for step, count in values(lines, "skipped_updates") if count > 0]
    found += [Trouble("skipped_updates", n, None, "Updates skipped", text) for n in skipped[:1]]
    return sorted(found, key=lambda trouble: (trouble.until is not None, trouble.step))


def _paid_lengths(lines: Sequence[Line], key: str) -> tuple[Points, Callable[[float], bool]]:
    """Return lengths, 0 where the reward has not risen, and the test for too long ones."""
    rewards = dict(values(lines, "reward"))
    both = [(step, length, rewards[step]) for step, length in values(lines, key) if step in rewards]
    if len(both) <= WINDOW:
        return [], lambda _: False
    before = fmean(length for _, length, _ in both[:WINDOW])
    reward_before = fmean(reward for _, _, reward in both[:WINDOW])
    points = []
    for i, (step, length, _) in enumerate(both):
        paid = fmean(reward for _, _, reward in both[max(0, i - WINDOW + 1) : i + 1])
        points.append((step, length if paid > reward_before else 0.0))
    return points, lambda mean: mean > max(2 * before, before + 32)


def values(lines: Sequence[Line], key: str) -> Points:
    """Return the steps in which a metric was computed, with its values."""
    return [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a line is a finite number and not a bool."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def _stretch(points: Points, is_bad: Callable[[float], bool]) -> tuple[int, int | None] | None:
    """Return the latest stretch of steps with a bad mean of the window, if any."""
    bad = [
        is_bad(fmean(value for _, value in points[end - WINDOW : end]))
        for end in range(WINDOW, len(points) + 1)
    ]
    if not any(bad):
        return None
    last = len(bad) - 1 - bad[::-1].index(True)
    first = next((i + 1 for i in range(last, -1, -1) if not bad[i]), 0)
    # The first step that is bad itself in the first bad window: trouble rarely begins at once.
    window = points[first : first + WINDOW]
    began = next((step for step, value in window if is_bad(value)), window[0][0])
    return began, None if last == len(bad) - 1 else points[last + WINDOW - 1][0]
