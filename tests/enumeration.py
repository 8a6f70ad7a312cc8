"""Exact expectations through a trainer's own steps, in the world of `rlhf_pg.audit.world`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.audit import world
from rlhf_pg.audit.world import (
    COMPLETIONS as COMPLETIONS,
    EOS as EOS,
    MAX_LENGTH as MAX_LENGTH,
    PROMPTS as PROMPTS,
    SCORES as SCORES,
    A as A,
    B as B,
    ListedEngine as ListedEngine,
    gradient as gradient,
    model as model,
    score as score,
    tokenizer as tokenizer,
)
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.report.metrics import Meter
from rlhf_pg.trainers import PolicyGradientTrainer


class OtherSampler(ListedEngine):
    """Says what it is told, drawn from probabilities (C,2) of its own: one per token."""

    def __init__(self, logprobs: dict[tuple[int, ...], list[float]]) -> None:
        super().__init__()
        self.logprobs = logprobs

    def stream(self, *args: Any, **options: Any) -> Any:
        for place, completion in super().stream(*args, **options):
            completion.logprobs[:] = self.logprobs[tuple(completion.tokens)]
            yield place, completion


def make_trainer(
    trainer_type: type[PolicyGradientTrainer],
    tmp_path: Any,
    prompts: Sequence[str] = ("ab",),
    reward: Callable[..., list[float]] = score,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> PolicyGradientTrainer:
    """A trainer of that world, with these options."""
    defaults: dict[str, Any] = {
        "dtype": "float64",
        "max_completion_length": MAX_LENGTH,
        "max_grad_norm": 0.0,
        "prompts_per_step": len(prompts),
        "shuffle_dataset": False,
        "max_steps": 1,
        "output_dir": str(tmp_path),
        "aggregation": "constant",
        "beta": 0.0,
    }
    args: PolicyGradientConfig = trainer_type.config_type(**(defaults | options))
    own = {"train_dataset": [{"prompt": prompt} for prompt in prompts]} | (inputs or {})
    return world.make_trainer(trainer_type, args, reward=reward, **own)


@torch.no_grad()
def likeliest(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    """The greedy completion of a prompt, token by token, from unpadded forward passes."""
    said: list[int] = []
    while len(said) < MAX_LENGTH and EOS not in said:
        said.append(int(model(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
    return tuple(said)


# -------------------------------------------------------------------- what the trainer expects


def expected_gradient(trainer: PolicyGradientTrainer) -> Tensor:
    """E[gradient of one update], over everything that the policy could have said."""
    prompts = trainer.train_prompts.rows["prompt"]
    total = torch.zeros_like(flat_gradient(trainer))
    for says, probability in outcomes(trainer.model, prompts, trainer.args.num_generations):
        total += probability * gradient_of(trainer, says)
    return total


def outcomes(
    model: PreTrainedModel, prompts: Sequence[str], n: int
) -> Iterator[tuple[tuple[tuple[int, ...], ...], float]]:
    """Every way to answer each prompt `n` times, with its probability."""
    tables = [probabilities(model, prompt) for prompt in prompts for _ in range(n)]
    for says in itertools.product(COMPLETIONS, repeat=len(tables)):
        chances = [table[said] for table, said in zip(tables, says, strict=True)]
        yield says, torch.stack(chances).prod().item()


def gradient_of(trainer: PolicyGradientTrainer, says: Sequence[tuple[int, ...]]) -> Tensor:
    """The gradient of one update on the given completions, by the trainer's own steps."""
    assert isinstance(trainer.sampler.engine, ListedEngine)
    trainer.sampler.engine.says = says
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    batch = trainer.credit(trainer.infer(batch), Meter())
    trainer.learner.module.zero_grad()
    trainer.learner.accumulate(trainer.drop_truncated(batch), trainer.objective, Meter())
    return flat_gradient(trainer)


def ascent(trainer: PolicyGradientTrainer) -> Tensor:
    """E[gradient] of the policy in the units of grad J."""
    size = sum(p.numel() for p in trainer.model.parameters())
    return -MAX_LENGTH * expected_gradient(trainer)[:size]


def assert_close(actual: Tensor, expected: Tensor, rel: float = 1e-8) -> None:
    """The same gradient but for rounding, and not nothing."""
    assert expected.norm() > 1e-3
    assert (actual - expected).norm() <= rel * expected.norm()


def flat_gradient(trainer: PolicyGradientTrainer) -> Tensor:
    """Of the policy, followed by the critic where there is one."""
    parameters = trainer.learner.module.parameters()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([g.flatten() for g in grads]).clone()


# ------------------------------------------------------- the truth, by plain forward passes


def log_probs(model: PreTrainedModel, prompt: str, said: Sequence[int]) -> Tensor:
    """log p of each token of one completion, (T,)."""
    return world.distributions(model, prompt, said)[range(len(said)), list(said)]


def probabilities(model: PreTrainedModel, prompt: str) -> dict[tuple[int, ...], Tensor]:
    """p of every completion, detached; they sum to 1."""
    with torch.no_grad():
        table = {said: log_probs(model, prompt, said).sum().exp() for said in COMPLETIONS}
    assert abs(sum(table.values()) - 1) < 1e-12
    return table


def exact_gradient(
    trainer: PolicyGradientTrainer, reference: PreTrainedModel | None = None, beta: float = 0.0
) -> Tensor:
    """grad J, J = mean over prompts of E[score] - beta KL(pi || ref), summed over everything."""
    prompts = trainer.train_prompts.rows["prompt"]
    pulls = [] if reference is None else [(reference, {}, beta, None)]
    return world.exact_gradient(trainer.model, prompts, pulls=pulls)


def score_function_expectation(
    trainer: PolicyGradientTrainer, coefficients: Callable[[Sequence[tuple[int, ...]]], list[float]]
) -> Tensor:
    """E[sum_i c_i grad log p(y_i)] for one prompt: what an estimator with weights c expects."""
    (prompt,) = trainer.train_prompts.rows["prompt"]
    scores = {
        said: gradient(trainer.model, log_probs(trainer.model, prompt, said).sum())
        for said in COMPLETIONS
    }
    total = torch.zeros_like(scores[COMPLETIONS[0]])
    for says, chance in outcomes(trainer.model, [prompt], trainer.args.num_generations):
        for said, c in zip(says, coefficients(says), strict=True):
            total += chance * c * scores[said]
    return total
