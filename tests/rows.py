"""Rows and batches from lists with an entry for each row, and rows that a player makes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_pg.data import Batch, Prompt, Row
from rlhf_pg.rollout import RolloutEngine, SamplingParams
from rlhf_pg.rollout.players import Player


def batch_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    logprobs: Sequence[Sequence[float]] | None = None,
    truncated: Sequence[bool] | None = None,
    groups: Sequence[int] | None = None,
    actions: Sequence[Sequence[bool]] | None = None,
    offsets: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Batch:
    """Log-probabilities are 0 and each row has a group of its own, unless they are given."""
    rows = [
        Row(
            prompt_ids=prompt,
            ids=ids,
            logprobs=logprobs[i] if logprobs else [0.0] * len(ids),
            truncated=bool(truncated and truncated[i]),
            group=groups[i] if groups else i,
            actions=actions[i] if actions else None,
            offsets=offsets[i] if offsets else None,
        )
        for i, (prompt, ids) in enumerate(zip(prompts, completions, strict=True))
    ]
    return Batch.of(rows, **options)


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch, by name."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def played(
    player: Player,
    engine: RolloutEngine,
    examples: Sequence[Mapping[str, Any]],
    tokens: Sequence[Sequence[int]],
    indices: Sequence[int],
    n: int,
    params: SamplingParams,
    seed: int = 0,
) -> list[Row]:
    """All rows that a player makes, prompt by prompt."""
    prompts = [
        Prompt(index=index, dataset_row=i, example=example, ids=ids)
        for i, (index, example, ids) in enumerate(zip(indices, examples, tokens, strict=True))
    ]
    with engine.weights_synced():
        groups = {rows[0].group: rows for rows in player.play(engine, prompts, n, params, seed)}
    return [row for index in indices for row in groups[index]]


def episodes_of(*args: Any, **options: Any) -> list[Any]:
    """The episodes of `played`."""
    return [row.episode for row in played(*args, **options)]
