"""A world that can be listed: three tokens, at most two per completion, a model in float64.

The truth comes from plain forward passes of single rows, without padding or a trainer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_pg.rollout import Completion, RolloutEngine, SamplingParams
from rlhf_pg.rollout.token_sampling import truncate
from rlhf_pg.trainers import PolicyGradientTrainer

EOS = 0
A = 1
B = 2
MAX_LENGTH = 2
COMPLETIONS: list[Any] = [
    (EOS,),
    (A, EOS),
    (A, A),
    (A, B),
    (B, EOS),
    (B, A),
    (B, B),
]
PROMPTS = {"a": (A,), "ab": (A, B), "bba": (B, B, A)}
PRIVILEGED = {
    "a": "bba",
    "ab": "a",
    "bba": "ab",
}  # what a teacher sees that is the policy
# Scores without symmetry, one per (prompt, completion).
SCORES = {
    "a": dict(zip(COMPLETIONS, (0.3, 1.0, -0.7, 0.1, 2.0, -1.5, 0.4), strict=True)),
    "ab": dict(zip(COMPLETIONS, (1.1, -0.2, 0.6, 0.0, -1.0, 0.9, 0.5), strict=True)),
    "bba": dict(zip(COMPLETIONS, (-0.4, 0.8, 1.7, -2.0, 0.2, 0.3, 1.2), strict=True)),
}
PLAIN = SamplingParams(max_tokens=MAX_LENGTH)


def tokenizer() -> PreTrainedTokenizerFast:
    """Three tokens; pad is EOS, so a mask made of ids would be wrong."""
    backend = Tokenizer(models.WordLevel({"<eos>": EOS, "a": A, "b": B}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "pad_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def model(seed: int = 0) -> PreTrainedModel:
    """Return a GPT-2 of one layer, with noise on every parameter so that logits spread."""
    shape = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 8,
        "vocab_size": 3,
    }
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOS)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = GPT2LMHeadModel(GPT2Config(**shape, **special))
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.to(torch.float64).eval()


def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [SCORES[p][tuple(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]


class ListedEngine(RolloutEngine):
    """Says what it is told to, in place of sampling; asked for temperature 0, what is likeliest."""

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self.says: Sequence[tuple[int, ...]] = ()

    def session(self, params: SamplingParams, seed: int) -> Any:
        raise NotImplementedError

    def stream(
        self,
        prompts: Any,
        n: int,
        params: SamplingParams,
        *_: Any,
        **__: Any,
    ) -> Any:
        says: Any = self.says
        if params.temperature == 0:
            likeliest = partial(
                self.model.generate,
                max_new_tokens=MAX_LENGTH,
                do_sample=False,
            )
            says = []
            for prompt in prompts:
                tokens = likeliest(torch.tensor([prompt]))[0, len(prompt) :].tolist()
                says += [tokens] * n
        assert len(says) == n * len(prompts)
        for index, tokens in enumerate(says):
            reason: Any = "stop" if tokens[-1] == EOS else "length"
            yield (
                index,
                Completion(list(tokens), [0.0] * len(tokens), reason),
            )


def make_trainer(
    trainer_type: type[PolicyGradientTrainer],
    args: Any,
    train_dataset: Any,
    reward: Callable[..., list[float]] = score,
    policy: PreTrainedModel | None = None,
    **inputs: Any,
) -> PolicyGradientTrainer:
    """Return a trainer on listed completions, whose policy and critic have moved off the start."""
    inputs |= {"processing_class": tokenizer()}
    trainer = trainer_type(policy or model(), reward, args, train_dataset, **inputs)
    trainer.sampler.engine = ListedEngine(trainer.model)
    trainer.agreement.refuses = False  # what it says was not drawn from anything
    rng = torch.Generator().manual_seed(1)
    moved: Any = trainer.learner.module
    if trainer.critic is not None and not trainer.critic.head:  # a module of the caller's
        moved = trainer.model
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
            parameter.add_(0.1 * noise)
    return trainer


def distributions(
    model: PreTrainedModel,
    prompt: str,
    completion: Sequence[int],
    params: SamplingParams = PLAIN,
) -> Tensor:
    """Return log p of everything in place of each token of a completion, (T,V), under `params`."""
    ids = torch.tensor([[*PROMPTS[prompt], *completion]])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, -len(completion) - 1 : -1]
    return truncate(logits / params.temperature, params).log_softmax(-1)


def gradient(model: PreTrainedModel, objective: Tensor) -> Tensor:
    """Return d objective / d parameters of the model, flat."""
    parameters = list(model.parameters())
    return parameters_to_vector(torch.autograd.grad(objective, parameters, materialize_grads=True))


def exact_gradient(
    model: PreTrainedModel,
    prompts: Sequence[str],
    params: SamplingParams = PLAIN,
    pulls: Sequence[tuple[PreTrainedModel, dict[str, str], float, Any]] = (),
    scored: bool = True,
) -> Tensor:
    """Return grad J, J = mean over prompts of E[score] less the pulls, summed over everything.

    A pull is another model, the prompts that it sees in place of others, a coefficient, and a
    divergence of tokens at prefixes that are held fixed, or None for KL(policy || other) of whole
    completions.
    """
    total = torch.zeros((), dtype=torch.float64)
    for prompt, completion in product(prompts, COMPLETIONS):
        logprobs = distributions(model, prompt, completion, params)
        tokens = (range(len(completion)), list(completion))
        chance = logprobs[tokens].sum().exp()
        total = total + chance * SCORES[prompt][completion] * scored
        for other, seen, coef, compare in pulls:
            shown = seen.get(prompt, prompt)
            of_other = distributions(other, shown, completion, params).detach()
            if compare is None:
                divergence = chance * (logprobs - of_other)[tokens]
            else:
                divergence = chance.detach() * compare(logprobs, of_other)[0]
            total = total - coef * divergence.sum()
    return gradient(model, total / len(prompts))
