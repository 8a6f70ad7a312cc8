"""Losses and their KL against TRL's own code, on the same numbers.

Where the two differ, the difference is asserted as a number, with its reason.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from trl import rewards as theirs

from rlhf_pg.kl import kl_loss
from rlhf_pg.losses import cispo, clipped_surrogate, sapo, token_weights
from rlhf_pg.rewards import accuracy_reward, think_format_reward
from tests.peers.conftest import MAX_LENGTH

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@dataclass(frozen=True)
class Batch:
    """Four completions; the first has a hole, as tool output leaves one."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor  # (B,)
    mask: Tensor

    def rows(self, rows: slice) -> "Batch":
        return Batch(**{name: x[rows] for name, x in vars(self).items()})


def batch(drift: float = 0.4) -> Batch:
    """`drift`: the spread of log rho."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(4, 6, generator=generator, dtype=torch.float64)

    logprobs = -normal().abs() - 0.1
    mask = torch.arange(6) < torch.tensor([[6], [4], [1], [3]])
    mask[0, 2] = False
    return Batch(
        logprobs=logprobs,
        old=logprobs + drift * normal(),
        ref=logprobs + 0.5 * normal(),
        advantages=torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=torch.float64),
        mask=mask,
    )


def loss_of_trl(trainer, batch: Batch, tokens: Tensor | None = None) -> tuple[float, Tensor]:
    """Value, and gradient with respect to the log-probabilities.

    Args:
        tokens: of the whole step; by default those of the batch.
    """
    trainer.given = batch.logprobs.clone().requires_grad_()
    prompt = torch.ones(len(batch.mask), 1).long()
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": batch.mask.long(),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "old_logps": (batch.old * batch.mask).sum(1),  # RLOO's
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum() if tokens is None else tokens,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), trainer.given.grad


def loss_of_ours(
    loss, batch: Batch, aggregation: str, beta: float = 0.0, kl=None, denominator=None, **options
) -> tuple[float, Tensor]:
    """Likewise; `kl` is a function of logprobs and ref, added with weight `beta`."""
    logprobs = batch.logprobs.clone().requires_grad_()
    per_token, _ = loss(logprobs, batch.old, batch.advantages[:, None], batch.mask, **options)
    if beta:
        per_token = per_token + beta * torch.where(batch.mask, kl(logprobs, batch.ref), 0.0)
    weights = token_weights(batch.mask, aggregation, MAX_LENGTH, denominator, torch.float64)
    total = (per_token * weights).sum()
    total.backward()
    return total.item(), logprobs.grad


def assert_equal(ours: tuple[float, Tensor], theirs: tuple[float, Tensor], factor: float = 1.0):
    """`ours` = `factor` * `theirs`, value and gradient."""
    assert ours[0] == pytest.approx(factor * theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], factor * theirs[1], rtol=1e-12, atol=1e-15)
    assert ours[1].abs().max() > 1e-3


# --------------------------------------------------------------- policy losses

AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
}
BOUNDS = [
    {"epsilon": 0.2},
    {"epsilon": 0.1, "epsilon_high": 0.3},
    {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 1.4},
]


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate", "rlhf_pg.losses.token_weights")
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_clipped_losses(make, loss_type, bounds):
    trainer, numbers = make(loss_type=loss_type, **bounds), batch()
    ours = loss_of_ours(clipped_surrogate, numbers, AGGREGATIONS[loss_type], **bounds)
    assert_equal(ours, loss_of_trl(trainer, numbers))
    cut = (ours[1] == 0) & numbers.mask
    assert 0 < cut.sum() < numbers.mask.sum()


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
def test_sequence_level_ratio(make):
    # GSPO: the geometric mean of a completion's ratios
    options = {"importance_sampling_level": "sequence", "epsilon": 0.1}
    trainer, numbers = make(loss_type="grpo", **options), batch()
    ours = loss_of_ours(clipped_surrogate, numbers, "sequence_mean", **options)
    assert_equal(ours, loss_of_trl(trainer, numbers))


@pytest.mark.proves("rlhf_pg.losses.cispo")
def test_cispo(make):
    # TRL has no lower bound, and its epsilon_high is the upper bound itself: 1.2 is 1 + 0.2 here.
    trainer, numbers = make(loss_type="cispo", epsilon_high=1.2), batch()
    theirs = loss_of_trl(trainer, numbers)
    ours = loss_of_ours(cispo, numbers, "token_mean", epsilon=1.0, epsilon_high=0.2)
    assert_equal(ours, theirs)
    # With the lower bound of the paper's equation the weights below it are raised.
    bounded = loss_of_ours(cispo, numbers, "token_mean", epsilon=0.2, epsilon_high=0.2)
    ratio = (numbers.logprobs - numbers.old).exp()
    raised = (0.8 / ratio).clamp(min=1)
    torch.testing.assert_close(bounded[1], raised * theirs[1], rtol=1e-12, atol=1e-15)
    assert (raised[numbers.mask] > 1).any()


@pytest.mark.proves("rlhf_pg.losses.sapo")
def test_sapo(make):
    # TRL keeps them in float32, in which these are exact.
    temperatures = {"sapo_temperature_pos": 0.875, "sapo_temperature_neg": 1.25}
    trainer, numbers = make(loss_type="sapo", **temperatures), batch()
    ours = loss_of_ours(sapo, numbers, "sequence_mean", **temperatures)
    assert_equal(ours, loss_of_trl(trainer, numbers))


def test_delta_below_upper_bound_caps_ratio(make):
    # rho = 1.5, A = -1. TRL caps rho at delta first, and the clipped ratio, 1.2, then wins; here
    # delta is the highest ratio where A < 0, whatever the other bounds (and the config refuses it).
    row = batch().rows(slice(2, 3))
    row = replace(row, old=row.logprobs - torch.tensor(1.5).log(), advantages=-row.advantages / 0.4)
    theirs, _ = loss_of_trl(make(epsilon=0.2, delta=1.1), row)
    ours, _ = loss_of_ours(clipped_surrogate, row, "token_mean", epsilon=0.2, delta=1.1)
    assert (ours, theirs) == pytest.approx((1.1, 1.2))


def test_overflowing_ratio_stays_finite(make):
    # A < 0 and log rho = 800: exp overflows in TRL. Here |log rho| is held at 20, and counted.
    row = batch().rows(slice(2, 3))
    row = replace(row, old=row.logprobs - 800 * row.mask, advantages=-row.advantages)
    theirs, _ = loss_of_trl(make(), row)
    ours, gradient = loss_of_ours(clipped_surrogate, row, "token_mean")
    assert theirs == float("inf")
    assert ours == pytest.approx(0.4 * torch.tensor(20.0).double().exp().item())
    assert gradient.isfinite().all()


# --------------------------------------------------------------- KL


@pytest.mark.proves("rlhf_pg.kl.kl_loss")
def test_ratio_weighted_kl(make):
    trainer, numbers = make(loss_type="grpo", beta=0.3, use_bias_correction_kl=True), batch()

    def weighted(logprobs: Tensor, ref: Tensor) -> Tensor:
        return kl_loss(logprobs, numbers.old, ref, numbers.mask, "k3_ratio")

    ours = loss_of_ours(clipped_surrogate, numbers, "sequence_mean", beta=0.3, kl=weighted)
    assert_equal(ours, loss_of_trl(trainer, numbers))


# --------------------------------------------------------------- denominators


@pytest.mark.proves("rlhf_pg.losses.token_weights")
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_two_micro_batches(make, loss_type):
    """Nine tokens, then four, accumulated."""
    trainer = make(
        loss_type=loss_type, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    numbers, aggregation = batch(), AGGREGATIONS[loss_type]
    tokens = numbers.mask.sum()
    for rows in (slice(0, 2), slice(2, 4)):
        half = numbers.rows(rows)
        theirs = loss_of_trl(trainer, half, tokens)
        count = tokens if aggregation == "token_mean" else len(numbers.mask)
        ours = loss_of_ours(clipped_surrogate, half, aggregation, denominator=count)
        # "bnpo" is the mean of the halves' means, so that a token weighs 1/18 in the first and 1/8
        # in the second; here, as in "dapo", 1/13 in both.
        factor = 2 * half.mask.sum().item() / 13 if loss_type == "bnpo" else 1.0
        assert_equal(ours, theirs, factor)


# --------------------------------------------------------------- RLOO


@pytest.mark.proves("rlhf_pg.losses.clipped_surrogate")
def test_rloo_gradient_matches_at_first_update(make):
    # TRL's loss is one number per completion, and ours one per token over N * max length.
    numbers = batch(drift=0.0)
    theirs = loss_of_trl(make("rloo"), numbers)[1]
    ours = loss_of_ours(clipped_surrogate, numbers, "constant")[1]
    torch.testing.assert_close(MAX_LENGTH * ours, theirs, rtol=1e-12, atol=0)


def test_rloo_clips_tokens_instead_of_sequences(make):
    # Three tokens with rho = 1.1 and A = 1: their product, 1.331, is beyond TRL's 1.2, and the
    # gradient is gone; here each token is within it.
    row = batch().rows(slice(3, 4))
    row = replace(row, old=row.logprobs - torch.tensor(1.1).log(), advantages=-row.advantages / 1.1)
    theirs = loss_of_trl(make("rloo"), row)
    ours = loss_of_ours(clipped_surrogate, row, "constant")
    assert theirs[0] == pytest.approx(-1.2)
    assert theirs[1].tolist() == [[0] * 6]
    assert ours[0] == pytest.approx(-1.1 * 3 / MAX_LENGTH)
    torch.testing.assert_close(
        ours[1][row.mask], torch.full((3,), -1.1 / MAX_LENGTH).double(), rtol=1e-6, atol=0
    )


ANSWERS = ["<think>a</think> \\boxed{1/2}", "<think>a <think>b</think> 2", "\\boxed{0.5} </think>"]


def test_rewards_of_same_name_differ_only_in_answers_before_the_end_of_thinking() -> None:
    texts, truths = [[{"content": text}] for text in ANSWERS], ["\\frac{1}{2}"] * 3
    assert (accuracy_reward(texts, truths), theirs.accuracy_reward(texts, truths)) == (
        [1, 0, 0],
        [1, 0, 1],
    )
    assert think_format_reward(texts) == theirs.think_format_reward(texts) == [1, 0, 0]
