"""Known troubles in the curves of a run: their kind, their first step and a remedy.

Each rule uses the mean over a window of steps, so that a single bad step is not reported unless it
is enough to ruin a policy, and skips steps in which its metric was not computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple, TypeGuard

from rlhf_pg.boundary.user_code import LARGEST

WINDOW = 10  # steps
LENGTH = "completions/mean_length"
ALIKE = "All groups equal"
FAR = "Steps too large"

MetricsLine = Mapping[str, Any]
Points = list[tuple[int, float]]  # step, value


@dataclass(frozen=True)
class Trouble:
    """A stretch of a curve with a known trouble."""

    key: str  # the metric whose curve shows it
    step: int  # first step
    until: int | None  # last step; None if it goes on
    title: str
    text: str  # explanation and remedy


class Rule(NamedTuple):
    """What makes a stretch of a curve bad; without points, those of the metric itself."""

    key: str
    points: Points | None
    is_bad: Callable[[float], bool]
    title: str
    text: str
    window: int = WINDOW


def troubles(lines: Sequence[MetricsLine]) -> list[Trouble]:
    """Return the troubles of a run, from the lines of its steps; the earliest first."""
    entropy = values(lines, "entropy")
    kl = values(lines, "kl")
    norms = values(lines, "grad_norm")
    first_entropy = fmean(x for _, x in entropy[:WINDOW]) if len(entropy) > WINDOW else 0.0
    usual_kl = median(x for _, x in kl[: max(WINDOW, len(kl) // 2)]) if kl else 0.0
    usual_norm = median(x for _, x in norms) if norms else 0.0
    paid = [(step, abs(reward) + std) for step, reward, std in _rewards(lines)]  # 0: all are 0
    rules = [
        Rule(
            "entropy",
            entropy,
            lambda mean: mean < 0.05 * first_entropy,
            "Entropy collapse",
            "Below 5% of what it was: the completions of a prompt are nearly the same, so little "
            "more can be learnt. If the reward is not yet good, begin again with entropy_coef, a "
            "larger epsilon_high or a smaller learning rate.",
        ),
        Rule(
            "entropy",
            _early_entropy(lines),
            lambda x: x < max(1e-3, 0.05 * entropy[0][1]),
            "All alike",
            "Completions of a prompt no longer differ, and the reward has not risen. Begin again "
            "with a smaller learning_rate; if they were so from the first step, raise temperature.",
            window=3,
        ),
        Rule(
            # Above 4 nats a token the reference would hardly ever have written it.
            "kl",
            kl,
            lambda mean: mean > max(0.5, min(4 * usual_kl, 4.0)),
            "KL explosion",
            "The policy has left its reference far behind, often to exploit the reward: read the "
            "completions. Use a larger beta, a smaller learning rate, or an earlier checkpoint.",
        ),
        Rule(
            "approx_kl/after",
            None,
            lambda kl: kl > 0.35,
            FAR,
            "They move the policy so far that the reward may not come back. Begin again, or from "
            "an earlier checkpoint, with a smaller learning_rate (for models of billions about "
            "1e-6, with LoRA 1e-5 to 2e-4), fewer num_iterations, or target_kl.",
            window=2,
        ),
        Rule(
            "reward",
            _falls(lines),
            lambda share: share > 1,
            "Reward falls",
            "It has lost half of its height. If it stays there, read the completions, and begin "
            "from an earlier checkpoint with a smaller learning_rate or a larger beta.",
            window=1,
        ),
        Rule(
            "reward",
            paid,
            lambda x: x == 0,
            "Reward is always 0",
            "No completion scores, so nothing can be learnt: read completions.jsonl. Check that "
            "the reward finds the answer; else use easier prompts, a longer "
            "max_completion_length, a reward for the format, or SFT first.",
            window=5,
        ),
        Rule(
            "frac_reward_zero_std",
            None,
            lambda mean: mean >= 0.9,
            ALIKE,
            "Nearly every prompt has one score for all its completions, from which group baselines "
            "learn nothing: prompts are too easy or too hard, the reward has too few steps, or the "
            "policy has collapsed.",
        ),
        Rule(
            "completions/clipped_ratio",
            None,
            lambda x: x >= 0.9,
            "Everything truncated",
            "Nearly no completion ends by itself. Check that the model knows its stop token and "
            "chat template, or raise max_completion_length; missing_eos_penalty rewards ending.",
        ),
        Rule(
            LENGTH,
            *_paid_lengths(lines),
            "Reward up while length runs away",
            "Completions are over twice as long as at first, and the reward rises with them. Check "
            "in the token view that length itself is not what is paid; overlong_buffer or a reward "
            "of length holds it back.",
        ),
        Rule(
            "grad_norm",
            norms,
            lambda mean: mean > 50 * usual_norm > 0,
            "Gradients explode",
            "The gradient is far longer than it usually is. Use a smaller learning rate or "
            "max_grad_norm, and look at the longest completions.",
        ),
        Rule(
            "explained_variance",
            values(lines, "explained_variance")[2 * WINDOW :],
            lambda mean: mean < 0,
            "The critic foresees nothing",
            "Its values are worse than a constant, and add noise to the advantages. Raise "
            "value_learning_rate or vf_coef, or train the critic alone at first.",
        ),
    ]
    if any("teacher/divergence" in line for line in lines):  # it needs no score, and leads far
        rules = [rule for rule in rules if rule.title not in ("Reward is always 0", ALIKE, FAR)]
    stretches = []
    for rule in rules:
        points = values(lines, rule.key) if rule.points is None else rule.points
        if stretch := _stretch(points, rule.is_bad, rule.window):
            stretches.append(Trouble(rule.key, *stretch, rule.title, rule.text))
    text = "`rlhf-pg replay RUN --step N` shows the completions of such a step."
    for step, count in values(lines, "skipped_updates"):
        if count > 0:
            stretches.append(Trouble("skipped_updates", step, None, "Updates skipped", text))
            break
    return sorted(stretches, key=lambda trouble: trouble.step)


def _rewards(lines: Sequence[MetricsLine]) -> list[tuple[int, float, float]]:
    """Return the steps that have a reward, each with its mean and its standard deviation."""
    spread = dict(values(lines, "reward_std"))
    return [(step, reward, spread.get(step, 0.0)) for step, reward in values(lines, "reward")]


def _falls(lines: Sequence[MetricsLine]) -> Points:
    """Return how far the mean of two rewards is below the best earlier mean, 1 being alarming.

    Alarming is half of the best mean's height above 0 (or above the lowest reward, if that is less)
    and beyond chance: half a standard deviation of scores, four of the means of steps.
    """
    rows = _rewards(lines)
    points = Points()
    best = -inf
    limit = inf
    for i in range(5, len(rows)):
        window = rows[max(0, i - 1 - WINDOW) : i - 1]
        earlier = [reward for _, reward, _ in window]
        mean = fmean(earlier)
        if mean > best:
            best = mean
            lowest = min(0.0, *(reward for _, reward, _ in rows[: i + 1]))
            spread = fmean(std for _, _, std in window)
            limit = max((best - lowest) / 2, spread / 2, 4 * pstdev(earlier), 1e-9)
        step, reward, _ = rows[i]
        latest = (rows[i - 1][1] + reward) / 2
        points.append((step, (best - latest) / limit))
    return points


def _early_entropy(lines: Sequence[MetricsLine]) -> Points:
    """Return the entropy of the first steps, infinite where the reward has clearly risen."""
    entropy = dict(values(lines, "entropy"))
    rows = _rewards(lines)[:WINDOW]
    points = Points()
    for step, reward, _ in rows:
        has_risen = reward > rows[0][1] + rows[0][2] / 4
        if step in entropy:
            points.append((step, inf if has_risen else entropy[step]))
    return points


def _paid_lengths(lines: Sequence[MetricsLine]) -> tuple[Points, Callable[[float], bool]]:
    """Return lengths, 0 where the reward has not risen, and the test for too long ones."""
    reward_at = dict(values(lines, "reward"))
    lengths = [(step, length) for step, length in values(lines, LENGTH) if step in reward_at]
    if len(lengths) <= WINDOW:
        return [], lambda _: False
    rewards = [reward_at[step] for step, _ in lengths]
    before = fmean(length for _, length in lengths[:WINDOW])
    reward_before = fmean(rewards[:WINDOW])
    points = []
    for i, (step, length) in enumerate(lengths):
        paid = fmean(rewards[max(0, i - WINDOW + 1) : i + 1])
        points.append((step, length if paid > reward_before else 0.0))
    return points, lambda mean: mean > max(2 * before, before + 32)


def values(lines: Sequence[MetricsLine], key: str) -> Points:
    """Return the steps in which a metric was computed, with its values."""
    return [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a line is a finite number and not a bool."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= LARGEST


def _stretch(
    points: Points, is_bad: Callable[[float], bool], window: int
) -> tuple[int, int | None] | None:
    """Return the latest stretch of steps with a bad mean of the window, if any; of windows of two
    steps the first, which may have ruined the policy.
    """
    bad = [
        is_bad(fmean(value for _, value in points[end - window : end]))
        for end in range(window, len(points) + 1)
    ]
    if not any(bad):
        return None
    if window == 2:
        last = bad.index(True)
        while last + 1 < len(bad) and bad[last + 1]:
            last += 1
    else:
        last = len(bad) - 1 - bad[::-1].index(True)
    first = last
    while first > 0 and bad[first - 1]:
        first -= 1
    # The first step that is bad itself in the first bad window: trouble rarely begins at once.
    begins = points[first : first + window]
    began = next((step for step, value in begins if is_bad(value)), begins[0][0])
    until = None
    if last < len(bad) - 1:
        until = points[last + window - 1][0]
    return began, until
