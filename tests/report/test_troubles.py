"""Known trouble is found where it is, and nowhere else."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_pg.report.run_page import charts_of
from rlhf_pg.report.troubles import Trouble, troubles

LENGTH = "completions/mean_length"


def lines(**curves: Sequence[Any]) -> list[dict[str, Any]]:
    """The lines of a run; `a__b` stands for the key a/b."""
    keys = {name.replace("__", "/"): curve for name, curve in curves.items()}
    count = len(next(iter(keys.values())))
    return [{"step": i + 1} | {key: curve[i] for key, curve in keys.items()} for i in range(count)]


def found(**curves: Sequence[Any]) -> list[tuple[str, int, int | None]]:
    return [(one.title, one.step, one.until) for one in troubles(lines(**curves))]


BAD = {
    "Entropy collapse": ({"entropy": [1.0] * 30 + [0.01] * 20}, 31),
    "KL explosion": ({"kl": [0.02] * 40 + [3.0] * 15}, 41),
    "Steps too large": ({"approx_kl/after": [0.001, 0.5, 0.6]}, 2),
    "Reward falls": (FALL := {"reward": [0.6] * 5 + [0.07] * 3, "reward_std": [0.5] * 8}, 7),
    "Reward is always 0": ({"reward": [0.0] * 5, "reward_std": [0.0] * 5}, 1),
    "All alike": ({"reward": [0.5] * 6, "entropy": [1.0] * 3 + [0.01] * 3}, 4),
    "All groups equal": ({"frac_reward_zero_std": [0.2] * 20 + [1.0] * 12}, 21),
    "Everything truncated": ({"completions/clipped_ratio": [0.0] * 20 + [1.0] * 12}, 21),
    "Reward up while length runs away": (
        {LENGTH: [100.0] * 30 + [900.0] * 20, "reward": [0.1] * 30 + [0.6] * 20},
        31,
    ),
    "Gradients explode": ({"grad_norm": [1.0] * 60 + [900.0] * 11}, 61),
    "Updates skipped": ({"skipped_updates": [0] * 5 + [1] + [0] * 20}, 6),
    "The critic foresees nothing": ({"explained_variance": [0.1] * 30 + [-0.5] * 15}, 31),
}
GOOD = {
    "entropy that falls to a tenth": {"entropy": [math.exp(-i / 20) for i in range(46)]},
    "KL that is high from the start": {"kl": [0.4] * 60},
    "KL with one peak": {"kl": [0.02] * 30 + [4.0] + [0.02] * 30},
    "reward that falls by less than half": FALL | {"reward": [0.6] * 5 + [0.35] * 3},
    "reward that is noisy": FALL | {"reward": [0.9, 0.2, 0.1, 0.8, 0.7, 0.1, 0.1, 0.1]},
    "costs that get worse within their spread": FALL | {"reward": [-0.3] * 5 + [-0.5] * 3},
    "reward that is 0 at first": {"reward": [0.0] * 4 + [0.1], "reward_std": [0.0] * 4 + [0.1]},
    "a task that is soon solved": {
        "reward": [0.1] * 3 + [1.0] * 6,
        "entropy": [1.0] * 3 + [0.01] * 6,
    },
    "one large step, or two that are larger": {"approx_kl/after": [0.5, 0.01, 0.01, 0.28, 0.2]},
    "groups half equal": {"frac_reward_zero_std": [0.85] * 40},
    "long completions from the start": {LENGTH: [900.0] * 50, "reward": [0.5] * 50},
    "length that grows while the reward falls": {
        LENGTH: [100.0] * 30 + [900.0] * 20,
        "reward": [0.6] * 30 + [0.4] * 20,
    },
    "short completions that double": {
        LENGTH: [4.0] * 30 + [9.0] * 20,
        "reward": [0.1] * 30 + [0.6] * 20,
    },
    "a single large gradient": {"grad_norm": [1.0] * 60 + [90.0] + [1.0] * 10},
    "a critic that has yet to learn": {"explained_variance": [-0.5] * 15 + [0.3] * 30},
    "a teacher without rewards": {
        "reward": [0.0] * 40,
        "frac_reward_zero_std": [1.0] * 40,
        "teacher/divergence": [0.1] * 40,
        "approx_kl/after": [0.7] * 40,
    },
    "no updates skipped": {"skipped_updates": [0] * 30},
    "nothing computed": {"kl": [None] * 40, "entropy": [None] * 40},
    "too few steps to say": {"frac_reward_zero_std": [1.0] * 9},
}


@pytest.mark.parametrize("title", BAD)
def test_trouble_is_found_where_it_begins(title: str) -> None:
    curves, begins = BAD[title]
    assert found(**curves) == [(title, begins, None)]


@pytest.mark.parametrize("what", GOOD)
def test_healthy_curve_has_no_trouble(what: str) -> None:
    assert found(**GOOD[what]) == []


def test_of_runs_on_a_real_model_those_far_from_their_reference_have_a_trouble() -> None:
    # Too high rates; the last one learnt, and left its reference far behind.
    rates = ("full-full-rate-0.001", "rank-1-rate-0.01", "rank-16-rate-0.005")
    far = {*(f"letters-grpo-{rate}-1" for rate in rates), "learned-ppo-1"}
    results = sorted(Path(__file__).parents[2].glob("docs/results/*.json"))
    assert far < {path.stem for path in results}
    for path in results:
        steps = json.loads(path.read_text())["steps"]
        said = troubles([{"step": i + 1} | line for i, line in enumerate(steps)])
        assert [one.title for one in said] == ["KL explosion"] * (path.stem in far), path


def test_troubles_come_in_order_and_say_when_they_are_over() -> None:
    truncated = [0.0] * 10 + [1.0] * 20 + [0.0] * 30
    equal = [0.0] * 40 + [1.0] * 20
    steps = [0.0] * 3 + [0.9] * 3 + [0.0] * 30 + [0.9] * 3 + [0.0] * 21
    curves = {"completions/clipped_ratio": truncated, "frac_reward_zero_std": equal}
    assert found(**curves, **{"approx_kl/after": steps}) == [
        ("Steps too large", 4, 7),
        ("Everything truncated", 11, 31),
        ("All groups equal", 41, None),
    ]


def test_first_step_without_numbers_is_no_collapse() -> None:
    """The reward rises at once, and falls again; an entropy of 2 nats is not the end of it."""
    rewards, entropies = [0.1, 0.6, 0.1, 0.1, 0.1], [None, 2.0, 2.0, 2.0, 2.0]
    pairs = zip(rewards, entropies, strict=True)
    lines = [
        {"step": i, "reward": r, "reward_std": 0.1, "entropy": h} for i, (r, h) in enumerate(pairs)
    ]
    assert troubles(lines) == []


def test_every_trouble_points_to_a_chart() -> None:
    all_found: list[Trouble] = [
        one for curves, _ in BAD.values() for one in troubles(lines(**curves))
    ]
    for trouble in all_found:
        (chart,) = charts_of([trouble.key])
        assert chart["group"] != "Other"
        assert trouble.text.endswith(".")
