"""Known trouble, found in the curves of a run: what it is, when it began and what to do.

Each rule looks at the mean over a window of steps, so that a single bad step is no trouble, and
skips the steps in which its number was not computed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

WINDOW = 10  # steps
ENTROPY_LEFT = 0.05  # of what it was at the beginning
KL_FAR = 0.5  # nats per token
KL_TIMES = 4.0  # of its median before
UPDATE_FAR = 0.1  # nats per token
MOST = 0.9  # share that is nearly all
LENGTH_TIMES, LENGTH_MORE = 2.0, 32.0
SAMPLER = "sampling/sampling_logp_difference/mean"
APART = 0.5  # nats per token between policy and sampler: more than rounding explains
NORM_TIMES = 50.0

Line = Mapping[str, Any]
Points = list[tuple[int, float]]  # step, value


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A stretch of a curve that is known trouble.

    Attributes:
        key: of the number whose curve shows it.
        step: with which it began.
        until: step with which it ended; None if it goes on.
        title: what it is called.
        text: what it means, and what to do.
    """

    key: str
    step: int
    until: int | None
    title: str
    text: str


def troubles(lines: Sequence[Line]) -> list[Trouble]:
    """Return the trouble of a run, from the lines of its steps; the earliest first."""
    found = [trouble for rule in RULES for trouble in rule(lines)]
    return sorted(found, key=lambda trouble: (trouble.until is not None, trouble.step))


def entropy_collapse(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find an entropy that has fallen to next to nothing."""
    points = values(lines, "entropy")
    start = fmean(value for _, value in points[:WINDOW]) if len(points) > WINDOW else 0.0
    if start > 0:
        yield from _stretch(
            *(points, "entropy", lambda mean: mean < ENTROPY_LEFT * start, "Entropy collapse"),
            f"Below {ENTROPY_LEFT:.0%} of what it was: the completions of a prompt are nearly the "
            "same, so little more can be learnt. If the reward is not yet good, begin again with "
            "entropy_coef, a larger epsilon_high or a smaller learning rate.",
        )


def kl_explosion(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find a policy that runs away from its reference, or within a step from itself."""
    points = values(lines, "kl")
    usual = median(value for _, value in points[: max(WINDOW, len(points) // 2)]) if points else 0
    yield from _stretch(
        *(points, "kl", lambda mean: mean > max(KL_FAR, KL_TIMES * usual), "KL explosion"),
        "The policy has left its reference far behind, often to exploit the reward: read the "
        "completions. Use a larger beta, a smaller learning rate, or an earlier checkpoint.",
    )
    yield from _stretch(
        *(values(lines, "approx_kl"), "approx_kl", lambda mean: mean > UPDATE_FAR),
        "Steps too large",
        "One step moves the policy further than its clipping assumes. Use a smaller learning rate, "
        "fewer num_iterations, or target_kl.",
    )


def equal_groups(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find groups of completions that nearly all have equal scores."""
    key = "frac_reward_zero_std"
    yield from _stretch(
        *(values(lines, key), key, lambda mean: mean >= MOST, "All groups equal"),
        "Nearly every prompt has one score for all its completions, from which group baselines "
        "learn nothing: the prompts are too easy or too hard, or the reward has too few steps.",
    )


def truncation(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find completions that are nearly all cut off."""
    key = "completions/clipped_ratio"
    yield from _stretch(
        *(values(lines, key), key, lambda mean: mean >= MOST, "Everything truncated"),
        "Nearly no completion ends by itself. Check that the model knows its stop token and chat "
        "template, or raise max_completion_length; missing_eos_penalty makes ending worth while.",
    )


def runaway_length(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find a reward that rises while completions grow far longer."""
    key = "completions/mean_length"
    lengths, rewards = values(lines, key), dict(values(lines, "reward"))
    both = [(step, length, rewards[step]) for step, length in lengths if step in rewards]
    if len(both) <= WINDOW:
        return
    length_before = fmean(length for _, length, _ in both[:WINDOW])
    reward_before = fmean(reward for _, _, reward in both[:WINDOW])
    longer = max(LENGTH_TIMES * length_before, length_before + LENGTH_MORE)
    paid = {
        both[i][0]: fmean(reward for _, _, reward in both[max(0, i - WINDOW + 1) : i + 1])
        for i in range(len(both))
    }
    # Where the reward does not rise, length alone is no sign of being paid for.
    shown = [(step, length if paid[step] > reward_before else 0.0) for step, length, _ in both]
    yield from _stretch(
        *(shown, key, lambda mean: mean > longer, "Reward up while length runs away"),
        f"Completions are over {LENGTH_TIMES:.0f} times as long as at first, and the reward rises "
        "with them. Check in the token view that length itself is not what is paid; "
        "overlong_buffer or a reward of length holds it back.",
    )


def sampler_apart(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find an engine that samples from another distribution than the policy's."""
    yield from _stretch(
        *(values(lines, SAMPLER), SAMPLER, lambda mean: mean > APART, "Sampler and policy apart"),
        "The engine's log-probabilities are further from the policy's than rounding explains: "
        "check that it serves this model, unquantised, and takes over its weights.",
    )


def gradients(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find gradients that grow out of all proportion, and updates that were skipped."""
    points = values(lines, "grad_norm")
    usual = median(value for _, value in points) if points else 0.0
    yield from _stretch(
        *(points, "grad_norm", lambda mean: mean > NORM_TIMES * usual > 0, "Gradients explode"),
        "The gradient is far longer than it usually is. Use a smaller learning rate or "
        "max_grad_norm, and look at the longest completions.",
    )
    skipped = [(step, value) for step, value in values(lines, "skipped_updates") if value > 0]
    if skipped:
        yield Trouble(
            key="skipped_updates",
            step=skipped[0][0],
            until=None,
            title="Updates skipped",
            text=f"Updates that were not finite were left out in {len(skipped)} of the steps: see "
            "skipped/ in the directory of the run for what was in them.",
        )


def blind_critic(lines: Sequence[Line]) -> Iterator[Trouble]:
    """Find a critic that foresees less than a constant would."""
    points = values(lines, "explained_variance")[2 * WINDOW :]  # it has to learn first
    yield from _stretch(
        *(points, "explained_variance", lambda mean: mean < 0, "The critic foresees nothing"),
        "Its values are worse than a constant, and add noise to the advantages. Raise "
        "value_learning_rate or vf_coef, or train the critic alone at first.",
    )


RULES: tuple[Callable[[Sequence[Line]], Iterator[Trouble]], ...] = (
    *(entropy_collapse, kl_explosion, equal_groups, truncation, runaway_length),
    *(sampler_apart, gradients, blind_critic),
)


def values(lines: Sequence[Line], key: str) -> Points:
    """Return the steps in which a number was computed, with it."""
    return [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]


def is_number(value: Any) -> bool:
    """Return whether a value of a line is a finite number, which a switch is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _stretch(
    points: Points, key: str, is_bad: Callable[[float], bool], title: str, text: str
) -> Iterator[Trouble]:
    """Yield the latest stretch of steps over which the mean of the window is bad, if any is."""
    if len(points) < WINDOW:
        return
    steps = [step for step, _ in points]
    bad = [
        is_bad(fmean(value for _, value in points[end - WINDOW : end]))
        for end in range(WINDOW, len(points) + 1)
    ]
    if not any(bad):
        return
    last = len(bad) - 1 - bad[::-1].index(True)
    first = last
    while first > 0 and bad[first - 1]:
        first -= 1
    until = None if last == len(bad) - 1 else steps[last + WINDOW - 1]
    # The first step of the first bad window that is bad itself: trouble seldom begins at once.
    window = points[first : first + WINDOW]
    began = next((step for step, value in window if is_bad(value)), window[0][0])
    yield Trouble(key=key, step=began, until=until, title=title, text=text)
