"""Training on what top-k, top-p and min-p keep: ratio and gradient on the saved support."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.report.json_lines import read
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import Completion, SamplingParams
from rlhf_pg.tasks import arithmetic
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    MAX_LENGTH,
    PROMPTS,
    SCORES,
    ListedEngine,
    gradient,
    gradient_of,
    make_trainer,
)

SAVED = {"truncated_sampling": "saved_support"}
TOP_2 = {"top_k": 2, **SAVED}
CUTS = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.7}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1}]
HELD_OUT = arithmetic().eval_dataset.select(range(9))


# ------------------------------------------------------ the exact gradient, on two of three tokens


@torch.no_grad()
def two_likeliest(model: PreTrainedModel, context: Sequence[int]) -> list[int]:
    """In order of their ids."""
    return sorted(model(torch.tensor([context])).logits[0, -1].topk(2).indices.tolist())


class Truncated(ListedEngine):
    """Says what it is told to, which was drawn from the two likeliest tokens."""

    def generate(self, prompts, n, params: SamplingParams, seed, prompt_ids=None):
        said = super().generate(prompts, n, params, seed, prompt_ids)
        if not params.truncates:
            return said
        return [self.supported(prompts[i // n], completion) for i, completion in enumerate(said)]

    def supported(self, prompt: Sequence[int], said: Completion) -> Completion:
        assert self.model is not None
        contexts = [[*prompt, *said.tokens[:t]] for t in range(len(said.tokens))]
        support = [torch.tensor(two_likeliest(self.model, context)) for context in contexts]
        return dataclasses.replace(said, support=[ids.int() for ids in support])


def make_truncated(trainer_type, tmp_path, **options):
    trainer = make_trainer(trainer_type, tmp_path, **TOP_2, **options)
    trainer.engine = Truncated(trainer.model)
    return trainer


class Kept:
    """The truncated distributions of a policy, on the sets that it keeps now, by plain forwards."""

    def __init__(self, policy: PreTrainedModel, prompt: str) -> None:
        self.prompt = list(PROMPTS[prompt])
        self.sets = {
            said[:t]: two_likeliest(policy, [*self.prompt, *said[:t]])
            for said in COMPLETIONS
            for t in range(len(said))
        }
        self.completions = [
            said
            for said in COMPLETIONS
            if all(token in self.sets[said[:t]] for t, token in enumerate(said))
        ]

    def distributions(self, model: PreTrainedModel, said: Sequence[int]) -> Iterator[Tensor]:
        """log p (2,) at every token of a completion."""
        logits = model(torch.tensor([[*self.prompt, *said]])).logits[0, len(self.prompt) - 1 : -1]
        for t in range(len(said)):
            yield logits[t, self.sets[tuple(said[:t])]].log_softmax(0)

    def log_prob(self, model: PreTrainedModel, said: Sequence[int]) -> Tensor:
        places = [self.sets[tuple(said[:t])].index(token) for t, token in enumerate(said)]
        return sum(p[i] for p, i in zip(self.distributions(model, said), places, strict=True))


def expected_gradient(trainer, kept: Kept) -> Tensor:
    """E[gradient of one update] over all pairs of completions that could have been drawn."""
    with torch.no_grad():
        chances = {s: kept.log_prob(trainer.model, s).exp().item() for s in kept.completions}
    assert 2 < len(chances) < len(COMPLETIONS)
    assert sum(chances.values()) == pytest.approx(1, abs=1e-12)
    return sum(
        p * q * gradient_of(trainer, (one, other))
        for one, p in chances.items()
        for other, q in chances.items()
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3
    assert (actual - expected).norm() <= 1e-8 * expected.norm()


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (RLOOTrainer, {}),
        (RLOOTrainer, {"num_iterations": 2}),  # the old log-probabilities are scored
        (RLOOTrainer, {"micro_batch_tokens": 5}),
        (ReinforceTrainer, {"num_generations": 2, "advantage_estimator": "returns"}),
        (GRPOTrainer, {"advantage_estimator": "leave_one_out", "num_mini_batches": 1}),
        (RLOOTrainer, {"beta": 0.3}),
        (ReinforceTrainer, {"num_generations": 2, "advantage_estimator": "returns", "beta": 0.3}),
    ],
)
def test_gradient_of_truncated_policy_is_exact(trainer_type, options, tmp_path: Path) -> None:
    """E[gradient] is that of J = E[score - beta log(pi_S / ref_S)] with the sets held fixed."""
    trainer = make_truncated(trainer_type, tmp_path, **{"num_generations": 2} | options)
    kept, beta = Kept(trainer.model, "ab"), options.get("beta", 0.0)
    reference = enumeration.model()
    objective = torch.zeros((), dtype=torch.float64)
    for said in kept.completions:
        log_p = kept.log_prob(trainer.model, said)
        kl = (log_p - kept.log_prob(reference, said)).detach()
        objective = objective + log_p.exp() * (SCORES["ab"][said] - beta * kl)
    exact = gradient(trainer.model, objective)
    assert_close(-MAX_LENGTH * expected_gradient(trainer, kept), exact)
    assert torch.cosine_similarity(exact, enumeration.exact_gradient(trainer), dim=0) < 0.999


def test_entropy_bonus_uses_truncated_policy(tmp_path: Path) -> None:
    def equal(prompts, **_):
        return [1.0] * len(prompts)

    trainer = make_truncated(
        RLOOTrainer, tmp_path, num_generations=2, reward=equal, entropy_coef=0.5
    )
    kept = Kept(trainer.model, "ab")
    objective = torch.zeros((), dtype=torch.float64)
    for said in kept.completions:
        chance = kept.log_prob(trainer.model, said).exp().detach()
        entropy = sum(-(p.exp() * p).sum() for p in kept.distributions(trainer.model, said))
        objective = objective + chance * entropy
    exact = 0.5 * gradient(trainer.model, objective)
    assert_close(-MAX_LENGTH * expected_gradient(trainer, kept), exact)


def test_engine_without_support_ids_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(RLOOTrainer, tmp_path, num_generations=2, **TOP_2)
    with pytest.raises(ValueError, match=r"row 0 .* the engine must say which ids"):
        gradient_of(trainer, [COMPLETIONS[0], COMPLETIONS[1]])


# ----------------------------------------------------------------- the ratio, on the native engine


def drawn(trainer):
    with trainer.sampling():
        return trainer.collector.collect(trainer.state.prompt_index, Meter()).samples.rollout


@pytest.mark.parametrize("cuts", CUTS)
def test_ratio_of_unchanged_policy_is_one(make, cuts) -> None:
    trainer = make(**cuts, **SAVED, num_mini_batches=2, temperature=1.3)
    rollout = drawn(trainer)
    old = trainer.learner.score(rollout).old_logprobs
    torch.testing.assert_close(old, rollout.sampler_logprobs, rtol=0, atol=1e-5)
    new = trainer.learner.policy(rollout).logprobs
    assert (new - old).exp().eq(1).all()


@pytest.mark.parametrize("cuts", CUTS)
@torch.no_grad()
def test_ratio_without_support_is_kept_mass(make, cuts) -> None:
    trainer = make(**cuts, **SAVED, temperature=1.3)
    rollout = drawn(trainer)
    assert rollout.support_ids.dtype == torch.int32
    full = trainer.learner.policy(dataclasses.replace(rollout, support_ids=None)).logprobs
    ratio = (full - rollout.sampler_logprobs).exp()
    everywhere = (trainer.learner.policy.logits(rollout) / 1.3).softmax(-1)
    mass = torch.zeros_like(ratio)
    for i, t in rollout.action_mask.nonzero().tolist():
        ids = [token for token in rollout.support_ids[i, t].tolist() if token >= 0]
        mass[i, t] = everywhere[i, t, ids].sum()
    mask = rollout.action_mask
    torch.testing.assert_close(ratio[mask], mass[mask], rtol=0, atol=1e-5)
    assert ratio[mask].mean() < 0.9


WITH_ALL = {**TOP_2, "top_k": 4, "sampler_correction": "token_mask", "max_steps": 1}


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (GRPOTrainer, {}),
        (GRPOTrainer, {"beta": 0.1, "use_peft": True, "micro_batch_tokens": 30}),
        (GRPOTrainer, {"dynamic_sampling_rounds": 2, "num_generations": 2}),
        (RLOOTrainer, {"advantage_estimator": "returns_minus_greedy", "beta": 0.1}),
        (ReinforceTrainer, {"beta": 0.1, "normalize_advantages": True}),
        (PPOTrainer, {"num_iterations": 1, "beta": 0.1}),
        (PPOTrainer, {"num_iterations": 1, "beta": 0.1, "critic": "shared"}),
    ],
)
def test_sampler_policy_and_reference_agree_at_first_step(
    make, tmp_path, trainer_type, options
) -> None:
    make(trainer_type, **(WITH_ALL | options)).train()
    [line] = read(tmp_path / "run" / "metrics.jsonl")
    assert line["sampling/sampling_logp_difference/mean"] < 1e-5
    assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert line["entropy"] < 1.3863  # log 4
    assert "beta" not in options or line["kl"] == pytest.approx(0, abs=1e-6)


def test_untruncated_sampling_saves_no_support(make) -> None:
    assert drawn(make()).support_ids is None


# ------------------------------------------------------------------ what else is sampled, and stop


def test_top_k_applies_to_sampled_but_not_greedy_evaluation(make) -> None:
    plain = make(eval_dataset=HELD_OUT).evaluate()
    best = make(eval_dataset=HELD_OUT, top_k=1, **SAVED).evaluate()
    assert plain["eval_reward"] != plain["eval_greedy_reward"]
    assert best["eval_greedy_reward"] == plain["eval_greedy_reward"]
    assert best["eval_reward"] == plain["eval_greedy_reward"]


def test_stop_string_ends_completion_and_is_kept(make) -> None:
    trainer = make(stop="1", max_completion_length=12)
    rollout = trainer.sample(trainer.train_prompts, [0, 1, 2], [0, 1, 2], 8, 1.0)
    texts = rollout.completions
    stopped = [text for text in texts if "1" in text]
    assert len(stopped) > 4
    assert all(text.index("1") == len(text) - 1 for text in stopped)
    ended = [not cut for cut in rollout.rollout.truncated.tolist()]
    assert all(end for end, text in zip(ended, texts, strict=True) if "1" in text)
