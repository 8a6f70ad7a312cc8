"""PPO: its expected gradient by enumeration, its critic, and what is paid where.

A loss is minimised and J is maximised; the constant weights divide by N * max_completion_length.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf_pg import PPOTrainer, RLOOTrainer
from rlhf_pg.data.batch import Batch
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    MAX_LENGTH,
    PROMPTS,
    SCORES,
    A,
    B,
    ascent,
    assert_close,
    exact_gradient,
    expected_gradient,
    log_probs,
    make_trainer,
)
from tests.trainers.conftest import estimated, objective_of

TWO = ("ab", "bba")
PLAIN = {"normalize_advantages": False, "num_iterations": 1, "lam": 1.0}


class Table(nn.Module):
    """A critic that looks every prefix up; one that is not in the table is worth -100."""

    def __init__(self, values: dict[tuple[int, ...], float]) -> None:
        super().__init__()
        self.prefixes = {prefix: i for i, prefix in enumerate(values)}
        self.values = nn.Parameter(torch.tensor([*values.values(), -100.0], dtype=torch.float64))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        rows = zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)
        return self.values[torch.tensor([self._places(ids, mask) for ids, mask in rows])]

    def _places(self, ids: list[int], mask: list[bool]) -> list[int]:
        seen: tuple[int, ...] = ()
        places = []
        for token, real in zip(ids, mask, strict=True):
            seen += (token,) * real
            places.append(self.prefixes.get(seen, -1))
        return places


def true_values(prompts: Sequence[str], gamma: float = 1.0) -> dict[tuple[int, ...], float]:
    """V of every prefix under the policy of `make_trainer`: what its completions are worth."""
    policy = make_trainer(RLOOTrainer, "unused", num_generations=2).model
    values = {}
    for prompt in prompts:
        chances = enumeration.probabilities(policy, prompt)
        for said in [(), (A,), (B,)]:
            after = [full for full in COMPLETIONS if full[: len(said)] == said]
            mass = sum(chances[full] for full in after)
            worth = [
                chances[full] / mass * gamma ** (len(full) - 1 - len(said)) * SCORES[prompt][full]
                for full in after
            ]
            values[(*PROMPTS[prompt], *said)] = float(sum(worth))
    return values


def ppo(
    tmp_path: Path, values: dict[tuple[int, ...], float] | None = None, **options
) -> PPOTrainer:
    """A trainer with this table for a critic, or with a critic of its own."""
    inputs = {} if values is None else {"value_model": Table(values)}
    trainer = make_trainer(PPOTrainer, tmp_path, inputs=inputs, **(PLAIN | options))
    assert isinstance(trainer, PPOTrainer)
    return trainer


def experience_of(trainer: PPOTrainer, says: Sequence[tuple[int, ...]]) -> Batch:
    return estimated(trainer, says)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"num_generations": 2, "num_iterations": 2},
        {"prompts": TWO, "num_mini_batches": 2, "lam": 0.0},
    ],
)
def test_true_values_make_gradient_exact(tmp_path, options) -> None:
    trainer = ppo(tmp_path, true_values(TWO), **options)
    assert_close(ascent(trainer), exact_gradient(trainer))


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_untrained_critic_leaves_policy_gradient_exact(tmp_path, critic) -> None:
    """With a shared trunk only if the value loss does not pull at it."""
    trainer = ppo(tmp_path, critic=critic, vf_coef=0.0 if critic == "shared" else 0.5)
    assert_close(ascent(trainer), exact_gradient(trainer))


def test_entropy_bonus_gradient_is_exact(tmp_path) -> None:
    trainer = ppo(tmp_path)
    bonus = torch.zeros((), dtype=torch.float64)
    for said in COMPLETIONS:
        chance = log_probs(trainer.model, "ab", said).sum().exp().detach()
        ids = torch.tensor([[*PROMPTS["ab"], *said]])
        log_p = trainer.model(ids).logits[0, len(PROMPTS["ab"]) - 1 : -1].log_softmax(-1)
        bonus = bonus - chance * (log_p.exp() * log_p).sum()
    ascents = [
        ascent(ppo(tmp_path, true_values(TWO), entropy_coef=coefficient))
        for coefficient in (0.7, 0.0)
    ]
    assert_close(ascents[0] - ascents[1], 0.7 * enumeration.gradient(trainer.model, bonus))


@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_true_values_make_expected_advantages_zero(tmp_path, lam) -> None:
    """In every state: over what may follow, the advantages of the next token cancel."""
    values = true_values(("ab",), gamma=0.5)
    trainer = ppo(tmp_path, values, num_generations=len(COMPLETIONS), lam=lam, gamma=0.5)
    advantages = experience_of(trainer, COMPLETIONS).advantages
    chances = enumeration.probabilities(trainer.model, "ab")
    weighted = torch.stack([chances[said] for said in COMPLETIONS])[:, None] * advantages
    after = {
        said: [i for i, full in enumerate(COMPLETIONS) if full[: len(said)] == said]
        for said in [(), (A,), (B,)]
    }
    for said, rows in after.items():
        assert weighted[rows, len(said)].abs().max() > 1e-3
        assert weighted[rows, len(said)].sum().item() == pytest.approx(0, abs=1e-12)


def test_fitted_critic_converges_to_true_values(tmp_path) -> None:
    """By the expected gradient of the value loss, while the policy stays.

    A step goes all the way to the expected target, so that a target made of later values is right
    when these are: after as many steps as a completion has tokens.
    """
    truth = true_values(("ab",))
    trainer = ppo(tmp_path, dict.fromkeys(truth, 0.0), lam=0.5, vf_coef=2.0, cliprange_value=None)
    table = trainer.critic.model.values
    chances = enumeration.probabilities(trainer.model, "ab")
    reached = [
        float(sum(p for full, p in chances.items() if full[: len(said)] == said))
        for said in [(), (A,), (B,)]
    ]
    for _ in range(MAX_LENGTH):
        # One whole error, times how often one is there.
        gradient = MAX_LENGTH / trainer.args.vf_coef * expected_gradient(trainer)[-len(table) :]
        with torch.no_grad():
            table -= gradient / torch.tensor([*reached, 1.0])
    assert table[:-1].tolist() == pytest.approx(list(truth.values()))
    assert table[-1] == -100


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_critic_starts_at_zero(make, critic) -> None:
    trainer = make(PPOTrainer, critic=critic)
    experience, metrics = estimated(trainer)
    assert experience.values.abs().max() == 0
    assert metrics["explained_variance"] == 0
    assert experience.returns.abs().max() > 0


def test_grad_norm_covers_policy_and_critic(make, tmp_path) -> None:
    trainer = make(PPOTrainer, max_grad_norm=1e-3, num_iterations=1)
    experience, _ = estimated(trainer)
    trainer.learner.accumulate(experience, trainer.objective, Meter())
    squares = [p.grad.double().square().sum() for p in trainer.learner.module.parameters()]
    norm = torch.stack(squares).sum().sqrt().item()
    trainer.learner.optimizer.zero_grad()
    assert trainer.learner.update(experience, trainer.objective, Meter())[
        "grad_norm"
    ] == pytest.approx(norm)


def test_explained_variance_by_hand(tmp_path) -> None:
    """Completions (EOS) and (A, EOS) with scores .3 and 1; V = .1 before them, .4 after A."""
    values = {PROMPTS["a"]: 0.1, (*PROMPTS["a"], A): 0.4}
    trainer = ppo(tmp_path, values, prompts=("a",), num_generations=2)
    _, metrics = estimated(trainer, [(EOS,), (A, EOS)])
    # returns .3, 1, 1; errors .2, .9, .6: variances .1089 (= .98/9) and .0822 (= .74/9)
    assert metrics["explained_variance"] == pytest.approx(1 - 0.74 / 0.98)


# V of the prefixes of one completion of the prompt "a", and of what might follow it.
GOLDEN = {(A,): 0.5, (A, A): 0.6, (A, A, A): 0.7, (A, A, A, A): 0.8}


def golden(tmp_path, said: tuple[int, ...], score: float, **options) -> list[float]:
    """Advantages of one completion of the prompt "a"."""
    trainer = ppo(
        tmp_path,
        GOLDEN,
        prompts=("a",),
        reward=lambda prompts, **_: [score],
        **({"lam": 0.95, "max_completion_length": 3} | options),
    )
    return experience_of(trainer, [said]).advantages[0].tolist()


def test_score_is_paid_at_last_token(tmp_path) -> None:
    # delta = .1, .4; a slot after EOS, worth .7, would have made .46575 of the .48
    assert golden(tmp_path, (A, EOS), 1.0) == pytest.approx([0.1 + 0.95 * 0.4, 0.4])


@pytest.mark.parametrize(
    ("bootstrap", "expected"),
    [
        (True, [0.28525, 0.195, 0.1]),
        (False, [0.1 + 0.95 * (0.1 - 0.95 * 0.7), 0.1 - 0.95 * 0.7, -0.7]),
    ],
)
def test_bootstrap_truncated_sets_value_after_cut_off(tmp_path, bootstrap, expected) -> None:
    advantages = golden(tmp_path, (A, A, A), 0.0, bootstrap_truncated=bootstrap)
    assert advantages == pytest.approx(expected)


def test_ended_completion_is_never_bootstrapped(tmp_path) -> None:
    plain, bootstrapped = (
        golden(tmp_path, (A, A, EOS), 1.0, bootstrap_truncated=b) for b in (False, True)
    )
    assert plain == bootstrapped


def test_normalize_advantages_leaves_returns_unchanged(tmp_path) -> None:
    options = {"prompts": TWO, "num_generations": 3, "lam": 0.9}
    says = [COMPLETIONS[i] for i in (0, 3, 2, 5, 1, 4)]
    plain = experience_of(ppo(tmp_path, **options), says)
    white = experience_of(ppo(tmp_path, normalize_advantages=True, **options), says)
    mask = plain.action_mask
    tokens = plain.advantages[mask].numpy()
    expected = (tokens - tokens.mean()) / (tokens.var() + 1e-8) ** 0.5
    assert white.advantages[mask].tolist() == pytest.approx(expected.tolist())
    assert white.advantages[~mask].abs().sum() == 0
    assert white.returns.equal(plain.returns)
    assert plain.returns[mask].equal((plain.advantages + plain.values)[mask])


@pytest.mark.fault(41, "the updates of the step stop (target_kl)")
def test_target_kl_stops_updates(make, tmp_path) -> None:
    """The first update is always made; what comes after one that went too far is not."""
    options = {"num_iterations": 4, "learning_rate": 1e-2, "max_steps": 1}
    free = make(PPOTrainer, target_kl=100.0, output_dir=str(tmp_path / "free"), **options)
    free.train()
    once = make(PPOTrainer, output_dir=str(tmp_path / "one"), **options | {"num_iterations": 1})
    once.train()
    stopped = make(PPOTrainer, target_kl=1e-4, **options)
    stopped.train()
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    (of_free,) = read(tmp_path / "free" / "metrics.jsonl")
    assert (line["num_updates"], of_free["num_updates"]) == (1, 4)
    assert line["approx_kl"] > 1e-4
    assert weights(stopped).allclose(weights(once), atol=1e-6)
    assert not weights(stopped).allclose(weights(free), atol=1e-3)
    gradients = [p.grad for p in stopped.learner.module.parameters()]
    assert not any(g is not None and g.any() for g in gradients)  # the discarded one


def weights(trainer: PPOTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.learner.module.parameters()])


def test_loss_is_sum_of_policy_value_and_entropy_terms(tmp_path) -> None:
    """Policy, value and entropy against plain tensor arithmetic, off the old policy."""
    options = {"prompts": TWO, "num_generations": 2, "vf_coef": 0.3, "entropy_coef": 0.2}
    options["aggregation"] = "token_mean"
    trainer = ppo(tmp_path, num_iterations=2, cliprange_value=0.05, **options)
    batch = experience_of(trainer, [COMPLETIONS[i] for i in (0, 3, 2, 5)])
    with torch.no_grad():
        for parameter in trainer.learner.module.parameters():
            parameter.mul_(1.3)
    new = trainer.learner.module(batch)
    total = 0.0
    for i, t in batch.action_mask.nonzero().tolist():
        ratio = (new.logprobs - batch.old_logprobs)[i, t].exp().item()
        advantage, target = batch.advantages[i, t].item(), batch.returns[i, t].item()
        policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        old, value = batch.values[i, t].item(), new.values[i, t].item()
        held = old + min(max(value - old, -0.05), 0.05)
        squares = max((value - target) ** 2, (held - target) ** 2)
        total += policy + 0.3 * squares / 2 - 0.2 * new.entropy[i, t].item()
    expected = total / batch.action_mask.sum().item()
    assert objective_of(trainer, new, batch).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("trainer_type", "options"), [(PPOTrainer, {}), (RLOOTrainer, {"use_peft": True})]
)
def test_optimizer_lacking_trained_parameters_is_refused(
    make, model_path, trainer_type, options
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizers: yours lacks the trained parameter"):
        make(trainer_type, model=model, optimizers=(optimizer, None), **options)
