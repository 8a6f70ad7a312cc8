"""Exact expectations: with three tokens and at most two per completion, all can be listed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import Completion, RolloutEngine, SamplingParams
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.tiny import tiny_model

EOS, A, B = 0, 1, 2
MAX_LENGTH = 2
COMPLETIONS = [(EOS,), (A, EOS), (A, A), (A, B), (B, EOS), (B, A), (B, B)]
PROMPTS = {"a": (A,), "ab": (A, B), "bba": (B, B, A)}

# Scores without symmetry, one per (prompt, completion).
SCORES = {
    prompt: dict(zip(COMPLETIONS, scores, strict=True))
    for prompt, scores in {
        "a": (0.3, 1.0, -0.7, 0.1, 2.0, -1.5, 0.4),
        "ab": (1.1, -0.2, 0.6, 0.0, -1.0, 0.9, 0.5),
        "bba": (-0.4, 0.8, 1.7, -2.0, 0.2, 0.3, 1.2),
    }.items()
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Three tokens; pad is EOS, so a mask made of ids would be wrong."""
    backend = Tokenizer(models.WordLevel({"<eos>": EOS, "a": A, "b": B}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def model(seed: int = 0) -> PreTrainedModel:
    return tiny_model(
        "gpt2",
        vocab_size=3,
        dtype=torch.float64,
        seed=seed,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [SCORES[p][tuple(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]


class ListedEngine(RolloutEngine):
    """Says what it is told to, in place of sampling; asked for temperature 0, what is likeliest."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self.model = model
        self.says: Sequence[tuple[int, ...]] = ()

    def session(self, params: SamplingParams, seed: int) -> Any:
        raise NotImplementedError

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        says = self.says
        if params.temperature == 0:
            assert self.model is not None
            says = [likeliest(self.model, prompt) for prompt in prompts for _ in range(n)]
        assert len(says) == n * len(prompts)
        ends = ["stop" if said[-1] == EOS else "length" for said in says]
        for place, (said, end) in enumerate(zip(says, ends, strict=True)):
            yield place, Completion(list(said), [0.0] * len(said), end)


@torch.no_grad()
def likeliest(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[int, ...]:
    """The greedy completion of a prompt, token by token, from unpadded forward passes."""
    said: list[int] = []
    while len(said) < MAX_LENGTH and EOS not in said:
        logits = model(torch.tensor([[*prompt, *said]])).logits[0, -1]
        said.append(int(logits.argmax()))
    return tuple(said)


def make_trainer(
    trainer_type: type[PolicyGradientTrainer],
    tmp_path: Any,
    prompts: Sequence[str] = ("ab",),
    reward: Callable[..., list[float]] = score,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> PolicyGradientTrainer:
    """A trainer in float64 on listed completions, whose policy has moved off its reference, and
    whose critic, if it has a head, off 0.
    """
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
    trainer = trainer_type(
        model=model(),
        reward_funcs=reward,
        args=args,
        processing_class=tokenizer(),
        **{"train_dataset": Dataset.from_dict({"prompt": list(prompts)}), **(inputs or {})},
    )
    trainer.sampler.engine = ListedEngine(trainer.model)
    trainer.learner.agreement.refuses = False  # what it says was not drawn from anything
    critic = trainer.critic if trainer.critic is not None and trainer.critic.head else None
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in [*trainer.model.parameters(), *(critic.parameters() if critic else ())]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.1 * noise)
    return trainer


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
    batch, _ = trainer.estimate(trainer.score(batch), Meter())
    trainer.learner.module.zero_grad()
    trainer.learner.accumulate(trainer.drop_truncated(batch), Meter())
    return flat_gradient(trainer)


def flat_gradient(trainer: PolicyGradientTrainer) -> Tensor:
    """Of the policy, followed by the critic where there is one."""
    parameters = trainer.learner.module.parameters()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([g.flatten() for g in grads]).clone()


# ------------------------------------------------------- the truth, by plain forward passes


def log_probs(model: PreTrainedModel, prompt: str, said: Sequence[int]) -> Tensor:
    """log p of each token of one completion, (T,), from an unpadded forward pass."""
    ids = torch.tensor([[*PROMPTS[prompt], *said]])
    logits = model(ids).logits[0, len(PROMPTS[prompt]) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(said)), torch.tensor(said)]


def probabilities(model: PreTrainedModel, prompt: str) -> dict[tuple[int, ...], Tensor]:
    """p of every completion, detached; they sum to 1."""
    with torch.no_grad():
        table = {said: log_probs(model, prompt, said).sum().exp() for said in COMPLETIONS}
    assert abs(sum(table.values()) - 1) < 1e-12
    return table


def gradient(model: PreTrainedModel, objective: Tensor) -> Tensor:
    parameters = list(model.parameters())
    grads = torch.autograd.grad(objective, parameters, allow_unused=True)
    pairs = zip(grads, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def exact_gradient(
    trainer: PolicyGradientTrainer, reference: PreTrainedModel | None = None, beta: float = 0.0
) -> Tensor:
    """grad J, J = mean over prompts of E[score] - beta KL(pi || ref), summed over everything."""
    prompts = trainer.train_prompts.rows["prompt"]
    objective = torch.zeros((), dtype=torch.float64)
    for prompt in prompts:
        for said in COMPLETIONS:
            log_p = log_probs(trainer.model, prompt, said).sum()
            paid = SCORES[prompt][said]
            if reference is not None:
                with torch.no_grad():
                    log_ref = log_probs(reference, prompt, said).sum()
                paid = paid - beta * (log_p - log_ref)
            objective = objective + log_p.exp() * paid / len(prompts)
    return gradient(trainer.model, objective)


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
