"""The same gradient however the rows are padded, ordered or split."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_pg import GRPOTrainer, PPOTrainer, RLOOTrainer
from rlhf_pg.data.batch import Batch
from rlhf_pg.report.metrics import Meter
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    PROMPTS as IDS,
    flat_gradient,
    gradient_of,
    make_trainer,
)
from tests.models.architectures import build
from tests.rows import tensors
from tests.tiny import stir
from tests.trainers.conftest import estimated

PROMPTS = ("a", "ab", "bba", "ab")
TAUGHT = {"teacher_mixup_alpha": 0.0, "privileged_prompt": "bb{prompt}"}
SAYS = [COMPLETIONS[i] for i in (0, 3, 2, 5, 1, 4, 6, 3, 2, 2, 5, 0)]  # three per prompt


def trainer_for(trainer_type, tmp_path: Path, **options) -> PolicyGradientTrainer:
    return make_trainer(
        trainer_type,
        tmp_path,
        prompts=PROMPTS,
        **{"num_generations": 3, "beta": 0.1, "aggregation": "token_mean"} | options,
    )


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= 1e-10 * expected.norm()


def experience_of(trainer: PolicyGradientTrainer) -> Batch:
    return estimated(trainer, SAYS)[0]


def accumulated(trainer: PolicyGradientTrainer, experience: Batch) -> Tensor:
    trainer.learner.module.zero_grad()
    trainer.learner.accumulate(experience, trainer.objective, Meter())
    return flat_gradient(trainer)


ADAPTERS = {"use_peft": True, "critic": "shared"}


@pytest.mark.parametrize(
    ("trainer_type", "options", "budget"),
    [
        (RLOOTrainer, {"aggregation": "token_mean"}, 12),
        (GRPOTrainer, {"aggregation": "sequence_mean"}, 5),
        (PPOTrainer, {"aggregation": "constant"}, 5),
        (PPOTrainer, {"aggregation": "constant", **ADAPTERS}, 5),
    ],
)
def test_micro_batches_leave_gradient_unchanged(trainer_type, options, budget, tmp_path) -> None:
    """Nor does it matter that activations are computed again."""
    whole = trainer_for(trainer_type, tmp_path, **options)
    split = {"micro_batch_tokens": budget, "gradient_checkpointing": True}
    split = trainer_for(trainer_type, tmp_path, **split, **options)
    for trainer in (whole, split):
        stir(trainer.learner.module)
    gradient = gradient_of(whole, SAYS)
    assert gradient.norm() > 0
    assert_equal(gradient_of(split, SAYS), gradient)


@pytest.mark.parametrize(
    ("trainer_type", "aggregation", "options"),
    [
        (GRPOTrainer, "token_mean", {}),
        (GRPOTrainer, "sequence_mean", {"gradient_checkpointing": True}),
        (PPOTrainer, "constant", {"gradient_checkpointing": True}),
        (PPOTrainer, "sequence_mean", {"use_peft": True}),
        (GRPOTrainer, "token_mean", {"teacher_model_name_or_path": "policy", **TAUGHT}),
    ],
)
def test_shared_prompt_pass_leaves_gradient_unchanged(
    trainer_type, aggregation, options, tmp_path
) -> None:
    """As by one padded row per completion."""
    trainer = trainer_for(trainer_type, tmp_path, aggregation=aggregation, **options)
    experience = experience_of(trainer)
    shared = accumulated(trainer, experience)
    teacher = trainer.learner.teacher
    models = [trainer.learner.policy, trainer.learner.reference.policy, trainer.critic]
    models.append(teacher and teacher.policy)
    for model in filter(None, models):
        assert model.window
        model.window = 0
    scored = experience_of(trainer)
    assert_equal(shared, accumulated(trainer, scored))
    assert_equal(experience.ref_logprobs, scored.ref_logprobs)


def test_recurrent_layers_keep_rows_apart(tmp_path) -> None:
    """Whatever the micro-batches and the order of rows, packed or not; norms are float32."""
    policy = build(
        "qwen3_5_text", vocab_size=3, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=EOS
    )
    trainer = trainer_for(PPOTrainer, tmp_path, inputs={"policy": policy})
    experience = experience_of(trainer)
    shuffled = torch.randperm(len(SAYS), generator=torch.Generator().manual_seed(3))
    expected = accumulated(trainer, experience)
    found = [accumulated(trainer, experience.select(shuffled))]
    trainer.learner.token_budget = 7
    found.append(accumulated(trainer, experience))
    trainer.learner.policy.window = trainer.critic.window = 0
    found.append(accumulated(trainer, experience))
    for other in found:
        assert (other - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.proves("rlhf_pg.losses.high_entropy")
@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
@pytest.mark.parametrize("budget", [6, 1000])
def test_high_entropy_tokens_alone_have_advantages(trainer_type, budget, tmp_path) -> None:
    """By one forward pass per row; truncated rows are left out before the tokens are counted."""
    options = {"beta": 0.0, "micro_batch_tokens": budget, "mask_truncated_completions": True}
    plain = trainer_for(trainer_type, tmp_path, **options)
    trainer = trainer_for(trainer_type, tmp_path, top_entropy_quantile=0.3, **options)
    batch, expected = experience_of(trainer), experience_of(plain).advantages
    tables = []
    for prompt, said in zip([p for p in PROMPTS for _ in range(3)], SAYS, strict=True):
        logits = plain.model(torch.tensor([[*IDS[prompt], *said]])).logits
        log_p = logits[0, len(IDS[prompt]) - 1 : -1].log_softmax(-1)
        tables.append(-(log_p.exp() * log_p).sum(-1))
    ended = sorted(
        h.item() for row, said in zip(tables, SAYS, strict=True) for h in row if said[-1] == EOS
    )
    lowest = ended[len(ended) - 1 - int(0.3 * (len(ended) - 1))] - 1e-9
    kept = torch.zeros_like(batch.action_mask)
    for row, own in enumerate(tables):
        kept[row, : len(own)] = own >= lowest
    assert kept.any()
    assert not kept[batch.action_mask].all()
    assert_equal(batch.advantages, torch.where(kept, expected, 0.0))


def test_padded_critic_micro_batches_stay_within_budget(tmp_path) -> None:
    """A value model of another kind is not packed, though the policy is."""
    trainer = trainer_for(PPOTrainer, tmp_path, micro_batch_tokens=12)
    trainer.critic.window = 0
    experience = experience_of(trainer)
    batches = [batch for _, batch in trainer.learner.micro_batches(experience)]
    assert sum(batch.num_rows for batch in batches) == len(SAYS)
    assert max(batch.num_rows * batch.width for batch in batches) <= 12


def test_row_order_leaves_gradient_unchanged(tmp_path) -> None:
    trainer = trainer_for(PPOTrainer, tmp_path)
    experience = experience_of(trainer)
    shuffled = torch.randperm(len(SAYS), generator=torch.Generator().manual_seed(3))
    expected = accumulated(trainer, experience)
    assert_equal(accumulated(trainer, experience.select(shuffled)), expected)


@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_padding_leaves_gradient_unchanged(trainer_type, tmp_path) -> None:
    """Three more columns of garbage on either side, where every per-token number is NaN."""
    trainer = trainer_for(trainer_type, tmp_path)
    experience = experience_of(trainer)
    padded = {}
    for name, value in tensors(experience).items():
        if value.ndim == 1:
            padded[name] = value
            continue
        shape = (len(value), 3, *value.shape[2:])
        garbage = torch.full(shape, torch.nan if value.is_floating_point() else 1)
        garbage = torch.zeros_like(garbage) if value.dtype == torch.bool else garbage
        left = name.startswith("prompt_")
        parts = [garbage.to(value.dtype), value]
        padded[name] = torch.cat(parts if left else parts[::-1], dim=1)
    expected = accumulated(trainer, experience)
    assert_equal(accumulated(trainer, Untrimmed(**padded)), expected)


class Untrimmed(Batch):
    """Keeps columns that are padding in every row, which micro-batches otherwise lose."""

    def select(self, rows: Tensor) -> Batch:
        return self


def test_blank_row_has_zero_gradient(tmp_path) -> None:
    trainer = trainer_for(PPOTrainer, tmp_path)
    blank = experience_of(trainer).blank_row()
    gradient = accumulated(trainer, blank)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert all(p.grad is not None for p in trainer.learner.module.parameters())


def test_group_of_equal_scores_has_zero_gradient(tmp_path) -> None:
    trainer = trainer_for(GRPOTrainer, tmp_path, beta=0.0)
    assert gradient_of(trainer, SAYS[:3] + SAYS[3:6] * 3).norm() > 0
    alike = [COMPLETIONS[1]] * 3 + [COMPLETIONS[2]] * 3 + [COMPLETIONS[5]] * 6
    gradient = gradient_of(trainer, alike)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_minibatch_gradients_sum_to_whole_batch_gradient(tmp_path) -> None:
    """The gradients of the minibatches, weighted by their rows, sum to that of the whole."""
    trainer = trainer_for(RLOOTrainer, tmp_path, aggregation="constant", num_mini_batches=3)
    experience = experience_of(trainer)
    total = torch.zeros_like(flat_gradient(trainer))
    for m in range(3):
        rows = (experience.groups % 3 == m).nonzero().squeeze(1)
        total += accumulated(trainer, experience.select(rows)) * len(rows) / len(SAYS)
    assert_equal(total, accumulated(trainer, experience))


def test_num_mini_batches_leaves_prompt_order_unchanged(tmp_path) -> None:
    def prompts(**options) -> list[str]:
        trainer = trainer_for(RLOOTrainer, tmp_path, shuffle_dataset=True, **options)
        trainer.sampler.engine.says = SAYS
        return trainer.sampler.roll_out(range(4)).prompts

    assert prompts() == prompts(num_mini_batches=3)
