"""What both sides are given: model, prompts, lengths of completions, reward."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.rollout import EOS, PAD
from rlhf_pg.tasks.tiny import word_tokenizer

BETAS = {"grpo": 0.0, "grpo_kl": 0.05, "rloo": 0.05}  # by method
LEARNING_RATE = 1e-6
MARKS = 4  # ids at the start of the vocabulary that are no words: pad, EOS and marks of turns


@dataclass(frozen=True)
class Workload:
    """P prompts of these lengths, n completions of each, of up to `new` tokens."""

    prompts: int
    shortest: int
    longest: int
    n: int
    new: int

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    @cached_property
    def prompt_lengths(self) -> list[int]:
        return self._uniform(0, self.shortest, self.longest, self.prompts).tolist()

    @cached_property
    def lengths(self) -> Tensor:
        """(P,n) of the completions, EOS included."""
        return self._uniform(1, -(-self.new // 4), self.new, self.prompts, self.n)

    def prompt_ids(self, vocabulary: int) -> list[list[int]]:
        """The tokens of the prompts, words all of them."""
        return [
            self._uniform(2 + i, MARKS, vocabulary - 1, length).tolist()
            for i, length in enumerate(self.prompt_lengths)
        ]

    def _uniform(self, seed: int, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(
            low, high + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64
        )


WORKLOADS = {
    "short": Workload(prompts=8, shortest=32, longest=128, n=8, new=128),
    "shared": Workload(prompts=4, shortest=448, longest=512, n=16, new=64),
    "long": Workload(prompts=8, shortest=32, longest=128, n=8, new=384),
}


@dataclass(frozen=True)
class Job:
    """One method on one workload, from the model at a path."""

    workload: Workload
    method: str
    model: str
    vocabulary: int
    dtype: str
    output_dir: str

    @property
    def beta(self) -> float:
        return BETAS[self.method]

    @property
    def algorithm(self) -> str:
        return self.method.removesuffix("_kl")

    def load(self) -> PreTrainedModel:
        """The policy, where it will be trained."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=getattr(torch, self.dtype))
        return model.to(device())

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per word."""
        return word_tokenizer([f"w{i}" for i in range(MARKS, self.vocabulary)])

    def dataset(self) -> Dataset:
        """The prompts as text."""
        prompts, tokenizer = self.workload.prompt_ids(self.vocabulary), self.tokenizer()
        return Dataset.from_dict({"prompt": [tokenizer.decode(ids) for ids in prompts]})

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """A number that varies within a group; and a look at whether the lengths were kept, of all
        groups at once or of each as it is sampled.
        """
        groups = torch.tensor([len(ids) for ids in completion_ids]).view(-1, self.workload.n)
        wanted = self.workload.lengths.tolist()
        assert all(group in wanted for group in groups.tolist())
        return [sum(ids) % 101 / 101 for ids in completion_ids]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def save_model(path: Path, vocabulary: int, width: int, layers: int, family: str = "qwen2") -> str:
    """A model of a family with random weights, heads of 64 and a tied head."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family](width))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def _of_qwen3_5(width: int) -> dict[str, Any]:
    """Three of four layers are gated delta nets, as published."""
    heads = max(1, width // 64)
    return {
        "head_dim": 64,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }


def _of_gpt_oss(width: int) -> dict[str, Any]:
    """Every second layer has a window of 128, all have sinks, as published; fewer experts."""
    return {
        "head_dim": 64,
        "intermediate_size": width,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    }


FAMILIES = {"qwen2": lambda width: {}, "qwen3_5_text": _of_qwen3_5, "gpt_oss": _of_gpt_oss}
