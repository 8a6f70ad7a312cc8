"""Which rows train, and baselines from beyond the batch, on listed completions in float64."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers import PolicyGradientTrainer
from tests import enumeration
from tests.enumeration import (
    EOS,
    MAX_LENGTH,
    SCORES,
    A,
    B,
    ascent,
    assert_close,
    exact_gradient,
    gradient_of,
    likeliest,
    log_probs,
    make_trainer,
)
from tests.rows import tensors
from tests.trainers.conftest import estimated

TWO = ("ab", "bba")
# Two prompts, three completions each; those without EOS are cut off.
SAYS = [(A, EOS), (A, B), (EOS,), (B, EOS), (B, EOS), (A, A)]
CUT = [(A, A), (B, B), (A, B), (B, A), (A, A), (A, B)]


def say(trainer: PolicyGradientTrainer, says: list[tuple[int, ...]]) -> None:
    assert isinstance(trainer.sampler.engine, enumeration.ListedEngine)
    trainer.sampler.engine.says = says


def advantages_of(says: list[tuple[int, ...]]) -> list[float]:
    """GRPO without the std, of all rows: those that were cut off are in the mean."""
    result = []
    for prompt, group in zip(TWO, (says[:3], says[3:]), strict=True):
        scores = [SCORES[prompt][said] for said in group]
        result += [score - statistics.mean(scores) for score in scores]
    return result


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_masked_truncated_completions_leave_loss_and_denominator(
    aggregation: str, tmp_path: Path
) -> None:
    trainer = make_trainer(
        GRPOTrainer,
        tmp_path,
        prompts=TWO,
        num_generations=3,
        scale_rewards="none",
        aggregation=aggregation,
        mask_truncated_completions=True,
        micro_batch_tokens=5,
    )
    whole = [i for i, said in enumerate(SAYS) if said[-1] == EOS]
    assert len(whole) == 4
    loss = torch.zeros((), dtype=torch.float64)
    advantages = advantages_of(SAYS)
    for i in whole:
        divisor = {
            "token_mean": sum(len(SAYS[j]) for j in whole),
            "sequence_mean": 4 * len(SAYS[i]),
            "constant": 4 * MAX_LENGTH,
        }[aggregation]
        log_p = log_probs(trainer.model, TWO[i // 3], SAYS[i]).sum()
        loss = loss - advantages[i] * log_p / divisor
    expected = enumeration.gradient(trainer.model, loss)
    assert_close(gradient_of(trainer, SAYS), expected, rel=1e-10)


@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_mask_truncated_completions_changes_only_action_mask(trainer_type, tmp_path: Path) -> None:
    """Attention, advantages, returns and reward metrics are those of a run with everything."""
    made = {}
    for masked in (False, True):
        trainer = make_trainer(
            trainer_type,
            tmp_path,
            prompts=TWO,
            num_generations=3,
            normalize_advantages=True,
            mask_truncated_completions=masked,
        )
        say(trainer, SAYS)
        experience, metrics = estimated(trainer)
        made[masked] = trainer.drop_truncated(experience), metrics
    (everything, metrics), (experience, masked_metrics) = made[False], made[True]
    assert masked_metrics == metrics
    for name, value in tensors(everything).items():
        if name != "action_mask":
            own = getattr(experience, name)
            torch.testing.assert_close(own, value, rtol=0, atol=0, equal_nan=True)
    assert experience.completion_mask.sum(1).tolist() == [2, 2, 1, 2, 2, 2]
    assert everything.action_mask.sum(1).tolist() == [2, 2, 1, 2, 2, 2]
    assert experience.action_mask.sum(1).tolist() == [2, 0, 1, 2, 2, 0]


def test_step_of_masked_completions_leaves_weights_unchanged(tmp_path: Path) -> None:
    options = {"entropy_target": 0.5, "kl_adaptive_lr": 0.1, "num_generations": 3, "max_steps": 2}
    options |= {"mask_truncated_completions": True, "num_iterations": 2, "target_kl": 0.1}
    trainer = make_trainer(PPOTrainer, tmp_path, prompts=TWO, **options)
    say(trainer, CUT)
    before = [p.clone() for p in trainer.learner.module.parameters()]
    coefficients = trainer.controllers.metrics()
    trainer.train()
    after = trainer.learner.module.parameters()
    assert all(p.equal(q) for p, q in zip(before, after, strict=True))
    assert trainer.controllers.metrics() == coefficients
    for line in read(tmp_path / "metrics.jsonl"):
        assert (line["loss"], line["grad_norm"], line["entropy"]) == (0.0, 0.0, None)
        assert line["completions/clipped_ratio"] == 1.0


def forwarded(trainer: PolicyGradientTrainer) -> list[int]:
    """The rows of every forward pass from here on."""
    rows: list[int] = []
    trainer.learner.module.register_forward_pre_hook(lambda _, args: rows.append(args[0].num_rows))
    return rows


REMAX: dict[str, Any] = {"advantage_estimator": "returns_minus_greedy"}


@pytest.mark.proves("rlhf_pg.advantages.estimators.returns_minus_greedy")
def test_greedy_baseline_is_unbiased(tmp_path: Path) -> None:
    trainer = make_trainer(ReinforceTrainer, tmp_path, beta=0.3, num_generations=1, **REMAX)
    assert_close(ascent(trainer), exact_gradient(trainer, enumeration.model(), 0.3))


def test_greedy_baseline_uses_completion_of_own_prompt(tmp_path) -> None:
    """Penalties and weights apply to both alike, and the KL is not in the baseline."""
    prompts = ("ab", "bba", "a")
    trainer = make_trainer(
        ReinforceTrainer,
        tmp_path,
        prompts=prompts,
        num_generations=2,
        missing_eos_penalty=0.25,
        reward_weights=(2.0,),
        beta=0.3,
        **REMAX,
    )
    says = [*SAYS[:4], *SAYS[3:5]]

    def paid(prompt: str, said: tuple[int, ...]) -> float:
        return 2 * SCORES[prompt][said] - (0.25 if said[-1] != EOS else 0.0)

    says_greedily = [likeliest(trainer.model, enumeration.PROMPTS[p]) for p in prompts]
    greedy = [paid(p, said) for p, said in zip(prompts, says_greedily, strict=True)]
    assert len(set(greedy)) == 3
    say(trainer, says)
    experience, metrics = estimated(trainer)
    assert metrics["rewards/greedy"] == pytest.approx(statistics.mean(greedy))
    assert experience.num_rows == 6
    for i, said in enumerate(says):
        # At the last token the return is the score less that token's KL.
        last = len(said) - 1
        u = (log_probs(trainer.model, prompts[i // 2], said))[last] - log_probs(
            enumeration.model(), prompts[i // 2], said
        )[last]
        expected = paid(prompts[i // 2], said) - 0.3 * u.item() - greedy[i // 2]
        assert experience.advantages[i, last].item() == pytest.approx(expected, abs=1e-10)


def test_greedy_completions_are_counted_but_not_trained_on(make, tmp_path) -> None:
    calls: list[list[list[int]]] = []

    def watched(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    options = {"max_steps": 1, "num_generations": 2, "beta": 0.0, **REMAX}
    trainer = make(ReinforceTrainer, reward_funcs=watched, **options)
    rows = forwarded(trainer)
    expected = trainer.sampler.sample(
        trainer.train_prompts, trainer.sampler.order.rows(range(4)), [0, 1, 2, 3], 1, 0.0
    )
    trainer.train()
    assert [len(ids) for ids in calls] == [2] * 4 + [1] * 4
    assert rows == [8, 1, 1]  # and one alone to compare, and one of 16 after the update
    sampled, greedy = ([ids for call in half for ids in call] for half in (calls[:4], calls[4:]))
    assert greedy == expected.token_lists()
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    assert line["rewards/greedy"] == statistics.mean(len(set(ids)) for ids in greedy)
    tokens = trainer.train_prompts.tokens
    prompts = sum(len(tokens[row]) for row in trainer.sampler.order.rows(range(4)))
    assert line["num_tokens"] == sum(map(len, [*sampled, *greedy])) + 3 * prompts
    assert line["completions/mean_length"] == statistics.mean(map(len, sampled))


def test_greedy_baseline_follows_dynamic_sampling(make) -> None:
    def first_digits(prompts: list[str], **_: Any) -> list[float]:
        return [float(p[0] in "13579") * (i % 2) for i, p in enumerate(prompts)]

    trainer = make(
        ReinforceTrainer,
        reward_funcs=first_digits,
        num_generations=2,
        dynamic_sampling_rounds=3,
        **REMAX,
    )
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    assert batch.num_prompts > 4
    assert batch.greedy.dataset_rows == batch.dataset_rows[::2]
    assert batch.greedy.prompts == batch.prompts[::2]


AVERAGE: dict[str, Any] = {"advantage_estimator": "returns_minus_moving_average"}


@pytest.mark.proves("rlhf_pg.advantages.estimators.returns_minus_moving_average")
def test_moving_average_baseline_is_unbiased(tmp_path: Path) -> None:
    trainer = make_trainer(ReinforceTrainer, tmp_path, beta=0.3, **AVERAGE)
    trainer.moving_average.update(-1.7)
    assert_close(ascent(trainer), exact_gradient(trainer, enumeration.model(), 0.3))
    assert trainer.moving_average.value == pytest.approx(-1.7)


def test_moving_average_baseline_weighs_earlier_returns(tmp_path: Path) -> None:
    """Weights 0.9^2, 0.9 and 1 from the oldest, over their sum; the KL is part of a return."""
    options = {"num_generations": 3, "max_steps": 4, "learning_rate": 0.05, "beta": 0.3}
    trainer = make_trainer(ReinforceTrainer, tmp_path, prompts=TWO, **options, **AVERAGE)
    say(trainer, SAYS)
    first = 0.0
    for i, said in enumerate(SAYS):
        models = trainer.model, enumeration.model()
        new, reference = (log_probs(model, TWO[i // 3], said).sum().item() for model in models)
        first += (SCORES[TWO[i // 3]][said] - 0.3 * (new - reference)) / len(SAYS)
    trainer.train()
    lines = read(tmp_path / "metrics.jsonl")
    g = [line["return"] for line in lines]
    assert g[0] == pytest.approx(first)
    assert len({round(x, 6) for x in g}) == 4
    expected = [0.0, g[0], (0.9 * g[0] + g[1]) / 1.9, (0.81 * g[0] + 0.9 * g[1] + g[2]) / 2.71]
    assert [line["moving_average"] for line in lines] == pytest.approx(expected)


IGNORED = {"truncated_sampling": "ignore"}
HELD_OUT = arithmetic().eval_dataset.select(range(9))


def test_ignored_truncation_trains_and_says_how_far_apart(make, tmp_path) -> None:
    make(top_k=4, **IGNORED, max_steps=2).train()
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert all(line["agreement/kl"] > 0.1 for line in lines)


def test_top_k_applies_to_sampled_but_not_greedy_evaluation(make) -> None:
    plain = make(eval_dataset=HELD_OUT).evaluate()
    best = make(eval_dataset=HELD_OUT, top_k=1, **IGNORED).evaluate()
    assert plain["eval_reward"] != plain["eval_greedy_reward"]
    assert best["eval_greedy_reward"] == plain["eval_greedy_reward"]
    assert best["eval_reward"] == plain["eval_greedy_reward"]
