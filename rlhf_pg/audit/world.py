"""A world that can be listed: three tokens, at most two per completion, a model in float64.

The truth comes from plain forward passes of single rows, without padding or a trainer.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from rlhf_pg.rollout import Completion, RolloutEngine, SamplingParams
from rlhf_pg.rollout.token_sampling import truncate
from rlhf_pg.trainers import PolicyGradientTrainer

EOS, A, B = 0, 1, 2
MAX_LENGTH = 2
COMPLETIONS = [(EOS,), (A, EOS), (A, A), (A, B), (B, EOS), (B, A), (B, B)]
SHORT = [(EOS,), (A,), (B,)]
LISTED: dict[int, Any] = {1: SHORT, MAX_LENGTH: COMPLETIONS}  # by max_completion_length
PROMPTS = {"a": (A,), "ab": (A, B), "bba": (B, B, A)}
# Scores without symmetry, one per (prompt, completion).
SCORES = {
    prompt: dict(zip([*COMPLETIONS, *SHORT[1:]], scores, strict=True))
    for prompt, scores in {
        "a": (0.3, 1.0, -0.7, 0.1, 2.0, -1.5, 0.4, 1.0, 2.0),
        "ab": (1.1, -0.2, 0.6, 0.0, -1.0, 0.9, 0.5, -0.2, -1.0),
        "bba": (-0.4, 0.8, 1.7, -2.0, 0.2, 0.3, 1.2, 0.8, 0.2),
    }.items()
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
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 3}
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

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self.model = model
        self.says: Sequence[tuple[int, ...]] = ()

    def session(self, params: SamplingParams, seed: int) -> Any:
        raise NotImplementedError

    def stream(self, prompts: Any, n: int, params: SamplingParams, *_: Any, **__: Any) -> Any:
        says = self.says
        if params.temperature == 0:
            says = [likeliest(self.model, prompt, params) for prompt in prompts for _ in range(n)]
        assert len(says) == n * len(prompts)
        for place, said in enumerate(says):
            end: Any = "stop" if said[-1] == EOS else "length"
            yield place, Completion(list(said), [0.0] * len(said), end)


@torch.no_grad()
def likeliest(model: Any, prompt: Sequence[int], params: SamplingParams = PLAIN) -> tuple[int, ...]:
    """Return the greedy completion of a prompt, token by token, from unpadded forward passes."""
    said: list[int] = []
    while len(said) < params.max_tokens and EOS not in said:
        said.append(int(model(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
    return tuple(said)


def make_trainer(
    trainer_type: type[PolicyGradientTrainer],
    args: Any,
    prompts: Sequence[str],
    reward: Callable[..., list[float]] = score,
    **inputs: Any,
) -> PolicyGradientTrainer:
    """Return a trainer on listed completions, whose policy has moved off its reference, and whose
    critic, if it has a head, off 0.
    """
    inputs = {"train_dataset": Dataset.from_dict({"prompt": list(prompts)}), **inputs}
    trainer = trainer_type(model(), reward, args, processing_class=tokenizer(), **inputs)
    trainer.sampler.engine = ListedEngine(trainer.model)
    trainer.learner.agreement.refuses = False  # what it says was not drawn from anything
    critic = trainer.critic if trainer.critic is not None and trainer.critic.head else None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in [*trainer.model.parameters(), *(critic.parameters() if critic else ())]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.1 * noise)
    return trainer


def log_probs(
    model: PreTrainedModel, prompt: str, said: Sequence[int], params: SamplingParams = PLAIN
) -> Tensor:
    """Return log p of each token of one completion, (T,), as `params` would sample it."""
    ids = torch.tensor([[*PROMPTS[prompt], *said]])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, -len(said) - 1 : -1]
    scores = truncate(logits / params.temperature, params).log_softmax(-1)
    return scores[torch.arange(len(said)), torch.tensor(said)]


def all_log_probs(model: PreTrainedModel, params: SamplingParams = PLAIN) -> Tensor:
    """Return `log_probs` of every completion of every prompt, (prompts * completions, T)."""
    pairs = product(PROMPTS, LISTED[params.max_tokens])
    return pad_sequence([log_probs(model, *pair, params) for pair in pairs], batch_first=True)


def gradient(model: PreTrainedModel, objective: Tensor) -> Tensor:
    """Return d objective / d parameters of the model, flat."""
    parameters = list(model.parameters())
    return parameters_to_vector(torch.autograd.grad(objective, parameters, materialize_grads=True))


def exact_gradient(
    model: PreTrainedModel,
    prompts: Sequence[str],
    reference: PreTrainedModel | None = None,
    beta: float = 0.0,
    params: SamplingParams = PLAIN,
) -> Tensor:
    """Return grad J, J = mean over prompts of E[score] - beta KL(pi || ref), both summed."""
    places = [[*PROMPTS].index(prompt) for prompt in prompts]
    log_p = all_log_probs(model, params).sum(1).view(len(PROMPTS), -1)[places]
    scores = [[SCORES[prompt][said] for said in LISTED[params.max_tokens]] for prompt in prompts]
    paid = log_p.new_tensor(scores)
    if reference is not None:
        with torch.no_grad():
            log_ref = all_log_probs(reference, params).sum(1).view(len(PROMPTS), -1)[places]
            paid = paid - beta * (log_p - log_ref)
    return gradient(model, (log_p.exp() * paid).sum() / len(prompts))
