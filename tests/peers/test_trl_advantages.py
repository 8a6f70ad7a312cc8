"""Advantages against TRL's own code, for the same scores, and weights for the same engine.

Where the two differ, the difference is asserted as a number, with its reason.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_pg.advantages import group_normalized, leave_one_out, total_scores
from rlhf_pg.kl import kl_estimate
from rlhf_pg.losses import sampler_weights
from rlhf_pg.masking import whiten
from tests.peers.conftest import MAX_LENGTH

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PROMPTS = [{"prompt": "1+1="}] * 4 + [{"prompt": "2+3="}] * 4
GROUPS = torch.tensor([0] * 4 + [1] * 4)
SCORES = [1.0, 0.0, 0.5, 3.0, -1.0, 2.0, 2.0, 0.25]
GAPS = [1.0, None, 0.5, 3.0, None, None, 2.0, None]


def scored(column):
    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return column

    return reward


def advantages_of_trl(make, kind, *columns, **options) -> Tensor:
    """For two prompts with four completions each, scored by one reward function per column."""
    trainer = make(kind, reward_funcs=[scored(column) for column in columns], **options)
    return trainer._generate_and_score_completions(PROMPTS)["advantages"]


def f32(column) -> Tensor:
    return torch.tensor([NAN if score is None else score for score in column])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.proves("rlhf_pg.advantages.group_normalized")
@pytest.mark.parametrize("scores", [SCORES, GAPS])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_normalized(make, scale, scores):
    theirs = advantages_of_trl(make, "grpo", scores, scale_rewards=scale)
    assert_close(group_normalized(f32(scores), GROUPS, scale), theirs)


@pytest.mark.proves("rlhf_pg.advantages.leave_one_out")
@pytest.mark.parametrize("scores", [SCORES, GAPS])
def test_leave_one_out(make, scores):
    assert_close(leave_one_out(f32(scores), GROUPS), advantages_of_trl(make, "rloo", scores))


@pytest.mark.proves("rlhf_pg.advantages.leave_one_out")
def test_leave_one_out_with_kl_in_reward(make):
    trainer = make("rloo", reward_funcs=[scored(SCORES)], beta=0.5)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.5)
    output = trainer._generate_and_score_completions(PROMPTS)
    ids, mask = (
        torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], 1)
        for name in ("ids", "mask")
    )
    width = output["completion_ids"].shape[1]
    with torch.no_grad():
        policy, ref = (
            trainer._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
            for model in (trainer.model, trainer.ref_model)
        )
    kl = (kl_estimate(policy, ref, "k1") * output["completion_mask"]).sum(1)
    assert kl.abs().max() > 0.1
    assert_close(leave_one_out(f32(SCORES) - 0.5 * kl, GROUPS), output["advantages"])


def test_missing_source_leaves_row_neutral(make):
    # TRL counts None as 0, so that whoever lacks a score seems worse: sums 1, 0, .5, 3. Here the
    # row is neutral in that source, and stands for the mean of the others, 4.5 / 3.
    first, second = [0.0] * 8, GAPS[:4] + SCORES[4:]
    theirs = advantages_of_trl(make, "grpo", first, second, scale_rewards="none")
    assert_close(theirs[:4], torch.tensor([1, 0, 0.5, 3]) - 4.5 / 4)
    total = total_scores(torch.stack([f32(first), f32(second)], dim=1), GROUPS)
    ours = group_normalized(total, GROUPS, "none")
    assert_close(ours[:4], torch.tensor([1, 1.5, 0.5, 3]) - 1.5)
    assert_close(ours[4:], theirs[4:])


def test_whitened_advantages_differ_by_std_convention(make):
    # TRL divides by the ddof-1 std plus 1e-4, over completions; `whiten` by the population's, with
    # 1e-8 under the root (and the trainers here whiten over tokens).
    advantages = leave_one_out(f32(SCORES), GROUPS)
    theirs = advantages_of_trl(make, "rloo", SCORES, normalize_advantages=True)
    ours = whiten(advantages, torch.ones(8).bool())
    assert_close(ours, theirs * (advantages.std() + 1e-4) / advantages.std(correction=0))
    assert (ours / theirs).mean().item() == pytest.approx((8 / 7) ** 0.5, rel=1e-3)


# --------------------------------------------------------------- another engine


@pytest.mark.proves("rlhf_pg.losses.sampler_weights")
@pytest.mark.parametrize("clip_min", [None, 0.8])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_sampler_weights(make, mode, clip_min):
    trainer = make(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=clip_min,
    )
    generator = torch.Generator().manual_seed(0)
    trainer.given = -torch.rand(8, MAX_LENGTH, generator=generator)
    trainer.sampled = trainer.given + 0.2 * torch.randn(8, MAX_LENGTH, generator=generator)
    output = trainer._generate_and_score_completions(PROMPTS)
    mask = output["completion_mask"].bool()
    theirs = output["importance_sampling_ratio"].expand(mask.shape)  # (B,1) for "sequence_*"
    ours = sampler_weights(trainer.given, trainer.sampled, mask, mode, 1.3, clip_min)
    assert_close(ours, theirs * mask)
    bound = 0.0 if mode.endswith("mask") else pytest.approx(1.3)
    assert any(weight == bound for weight in ours[mask].tolist())
