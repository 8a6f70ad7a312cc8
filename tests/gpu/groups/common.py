"""What the groups share."""

import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.policy import Policy
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.tasks import arithmetic
from rlhf_pg.tasks.tiny import character_tokenizer
from tests.gpu.check import SHORT
from tests.rows import batch_of, tensors
from tests.tiny import ARCHS

ARCHITECTURES = ["qwen3", "llama"] if SHORT in os.environ else list(ARCHS)
PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9]]
SAMPLING = SamplingParams(max_tokens=12)


def rollout_of(engine: NativeEngine, params: SamplingParams = SAMPLING) -> Batch:
    """Four completions of each prompt."""
    sampled = engine.generate(PROMPTS, 4, params, seed=0)
    return batch_of(
        [prompt for prompt in PROMPTS for _ in range(4)],
        [c.tokens for c in sampled],
        logprobs=[c.logprobs for c in sampled],
        truncated=[c.finish_reason == "length" for c in sampled],
        groups=[i for i in range(len(PROMPTS)) for _ in range(4)],
    )


def random_rollout(families: list[tuple[int, list[int]]]) -> Batch:
    """Random tokens: prompts of these lengths, each with completions of those."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 40, (count,), generator=generator).tolist()

    prompts = [tokens(prompt) for prompt, _ in families]
    rows = [(i, width) for i, (_, widths) in enumerate(families) for width in widths]
    return batch_of(
        [prompts[i] for i, _ in rows],
        [tokens(width) for _, width in rows],
        groups=[i for i, _ in rows],
    )


def on(rollout: Batch, device: str) -> Batch:
    return Batch(**{name: value.to(device) for name, value in tensors(rollout).items()})


@torch.no_grad()
def scored(model: PreTrainedModel, rollout: Batch, device: str) -> Tensor:
    """Log-probabilities of the sampled tokens by a scoring pass on the device, brought back."""
    return Policy(model)(on(rollout, device)).logprobs.cpu()


def gradient(model: PreTrainedModel, rollout: Batch, device: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens, and the gradient of a weighted sum of them, flat."""
    logprobs = Policy(model)(on(rollout, device)).logprobs[rollout.action_mask.to(device)]
    weights = torch.linspace(-1, 2, len(logprobs), device=device, dtype=logprobs.dtype)
    (weights * logprobs).sum().backward()
    grads = [p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None]
    return logprobs.detach().double().cpu(), torch.cat(grads)


def save_model(directory: str) -> str:
    """A random model of the embedded task."""
    torch.manual_seed(0)
    for part in arithmetic().new_model():
        part.save_pretrained(f"{directory}/model")
    return f"{directory}/model"


def save_wide_model(directory: str, device: str) -> str:
    """Of 0.2 billion parameters, with a large vocabulary and a tokenizer of digits; of few, where
    the checks alone are tried.
    """
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32768}
    if device == "cpu":
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads)).save_pretrained(
        f"{directory}/wide"
    )
    character_tokenizer("0123456789").save_pretrained(f"{directory}/wide")
    return f"{directory}/wide"


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(text)) for text in completions]
