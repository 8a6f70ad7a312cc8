"""Batches of an older policy: what each correction makes of the expected gradient, by enumeration.

`python -m tests.trainers.test_staleness` writes docs/staleness.json, which a page shows as a table.
"""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_pg import ReinforceTrainer
from rlhf_pg.report.metrics import Meter
from tests import enumeration
from tests.enumeration import COMPLETIONS, MAX_LENGTH, SCORES, OtherSampler, make_trainer

TABLE = Path(__file__).parents[2] / "docs" / "staleness.json"
STEP = 0.1  # along the true gradient, for each step that the sampler is behind
# By name: mode, lowest and highest weight. All are of one update but "a second update", which moves
# the policy once more within the step: there PPO's ratio is to the policy before the step, and the
# weight between that one and the sampler (decoupled PPO; Hilton et al. 2022).
CORRECTIONS: dict[str, tuple[str, float | None, float]] = {
    "none": ("none", None, 3.0),
    "token_truncate": ("token_truncate", None, 1.2),
    "token_mask": ("token_mask", None, 1.2),
    "IcePop": ("token_mask", 0.7, 1.2),
    "token_truncate, no bound": ("token_truncate", None, 1e6),
    "sequence_truncate": ("sequence_truncate", None, 1.2),
    "sequence_mask": ("sequence_mask", None, 1.2),
    "sequence_truncate, no bound": ("sequence_truncate", None, 1e6),
    "decoupled PPO, second update": ("sequence_truncate", None, 1e6),
}
CASES = [(staleness, name) for staleness in (1, 2) for name in CORRECTIONS]


def ascend(trainer: Any) -> None:
    """Move the policy along the true gradient."""
    step = enumeration.exact_gradient(trainer)
    with torch.no_grad():
        for parameter, own in zip(
            trainer.model.parameters(),
            step.split([p.numel() for p in trainer.model.parameters()]),
            strict=True,
        ):
            parameter += STEP * own.view_as(parameter)


def measure(directory: Any, staleness: int, name: str) -> tuple[float, float]:
    """|E[the trainer's gradient] - truth| / |truth|, and the variance / |truth|^2."""
    trainer = trainer_of(name, directory)
    second = "second" in name
    mode, low, high = CORRECTIONS[name]
    with torch.no_grad():
        sampler = {y: enumeration.log_probs(trainer.model, "ab", y) for y in COMPLETIONS}
    trainer.sampler.engine = OtherSampler({y: own.tolist() for y, own in sampler.items()})
    for _ in range(staleness):
        ascend(trainer)
    with torch.no_grad():
        before = {y: enumeration.log_probs(trainer.model, "ab", y) for y in COMPLETIONS}
    rows = []
    for said in COMPLETIONS:
        trainer.sampler.engine.says = [said]
        batch = trainer.sampler.next_batch(0, Meter())
        rows.append(trainer.credit(trainer.infer(batch), Meter()))
    if second:
        ascend(trainer)
    truth = enumeration.exact_gradient(trainer)
    found, formula, squares = torch.zeros_like(truth), torch.zeros_like(truth), 0.0
    for said, row in zip(COMPLETIONS, rows, strict=True):
        trainer.learner.module.zero_grad()
        trainer.learner.accumulate(row, trainer.objective, Meter())
        own, chance = (
            -MAX_LENGTH * enumeration.flat_gradient(trainer),
            float(sampler[said].sum().exp()),
        )
        found, squares = found + chance * own, squares + chance * float(own @ own)
        formula += chance * by_hand(trainer, said, sampler[said], before[said], mode, low, high)
    assert (found - formula).norm() <= 1e-8 * truth.norm()
    size = float(truth @ truth)
    return float((found - truth).norm()) / size**0.5, (squares - float(found @ found)) / size


def by_hand(
    trainer: Any,
    said: Any,
    sampler: Tensor,
    before: Tensor,
    mode: str,
    low: float | None,
    high: float,
) -> Tensor:
    """sum_t w_t rho_t [not clipped] s(y) grad log pi(y_t), token by token."""
    total: Any = 0.0
    now, score = enumeration.log_probs(trainer.model, "ab", said), SCORES["ab"][said]
    for t in range(len(said)):
        weight = math.exp(before[t] - sampler[t])
        if mode.startswith("sequence"):
            weight = math.exp(sum(before.tolist()) - sum(sampler.tolist()))
        if mode.endswith("truncate"):
            weight = max(low or 0.0, min(weight, high))
        if mode.endswith("mask"):
            weight *= (low or 0.0) <= weight <= high
        ratio = math.exp(now[t].detach() - before[t])
        if trainer.args.policy_loss == "clipped_surrogate":
            ratio *= ratio <= 1.2 if score > 0 else ratio >= 0.8
        total = total + (1.0 if mode == "none" else weight) * ratio * score * now[t]
    return enumeration.gradient(trainer.model, total)


def trainer_of(name: str, directory: Any) -> Any:
    mode, low, high = CORRECTIONS[name]
    bounds = {} if mode == "none" else {"sampler_clip_min": low, "sampler_clip_max": high}
    loss = {"policy_loss": "clipped_surrogate", "num_iterations": 2} if "PPO" in name else {}
    return make_trainer(
        ReinforceTrainer,
        directory,
        num_generations=1,
        advantage_estimator="returns",
        sampler_correction=mode,
        rollout_ahead=2,
        rollout_workers=1,
        **loss,
        **bounds,
    )


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
@pytest.mark.parametrize(("staleness", "name"), CASES)
def test_bias_by_staleness_equals_its_formula(tmp_path, staleness: int, name: str) -> None:
    bias, variance = measure(tmp_path, staleness, name)
    assert (bias <= 1e-8) == (name == "sequence_truncate, no bound")
    shown = json.loads(TABLE.read_text())[name][staleness - 1]
    assert [bias, variance] == pytest.approx(shown, rel=1e-6, abs=1e-8)


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        rows = {name: [measure(place, k, name) for k in (1, 2)] for name in CORRECTIONS}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
