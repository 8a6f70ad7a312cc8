"""From prompts to completions, as token ids for the learner and as text for the rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data import Prompts
from rlhf_pg.experience import Rollout
from rlhf_pg.rewards import totals
from rlhf_pg.rollout import RolloutEngine, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Samples:
    """B completions of this rank, in the order prompt * n + sample."""

    rollout: Rollout
    prompts: list[Any]  # as the dataset has them: strings or messages
    completions: list[Any]  # likewise
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]  # the dataset's other columns

    def records(self, scores: Tensor, names: Sequence[str], count: int) -> list[dict[str, Any]]:
        """The first completions of `count` prompts with the totals of their scores (B,T,K), for
        people to read.
        """
        total = totals(scores)
        groups = self.rollout.groups.tolist()
        firsts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group][:count]
        return [
            {
                "prompt": self.prompts[i],
                "completion": self.completions[i],
                **{f"rewards/{name}": total[i, k].item() for k, name in enumerate(names)},
            }
            for i in firsts
        ]


def collect(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    rows: Sequence[int],
    draws: Sequence[int],
    n: int,
    params: SamplingParams,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Samples:
    """Sample `n` completions of the given dataset rows.

    Args:
        draws: one number per row, which keys its noise and names its group.
        dtype: of the log-probabilities.
    """
    tokens = [prompts.tokens[row] for row in rows]
    sampled = engine.generate(tokens, n, params, seed, prompt_ids=draws)
    rollout = Rollout.from_tokens(
        prompts=[ids for ids in tokens for _ in range(n)],
        completions=[c.tokens for c in sampled],
        logprobs=[c.logprobs for c in sampled],
        truncated=[c.finish_reason == "length" for c in sampled],
        groups=[draw for draw in draws for _ in range(n)],
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        device=device,
    )
    ids = [c.tokens for c in sampled]
    repeated = [row for row in rows for _ in range(n)]
    columns: dict[str, list[Any]] = prompts.rows[repeated] if repeated else {}
    asked = columns.pop("prompt", [])
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
    return Samples(
        rollout=rollout,
        prompts=asked,
        completions=[
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(asked, texts, strict=True)
        ],
        completion_ids=ids,
        columns=columns,
    )
