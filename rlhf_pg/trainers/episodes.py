"""Episodes as a step trains on them: their record, what their environments paid, their metrics."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data import Prompts
from rlhf_pg.experience import Rollout, padded
from rlhf_pg.rollout import (
    Environment,
    Episode,
    Player,
    RolloutEngine,
    SamplingParams,
    ToolEnvironment,
)
from rlhf_pg.trainers.samples import Samples


def collect_episodes(
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
    player: Player,
) -> Samples:
    """Play `n` episodes of the given dataset rows; the other arguments are those of `collect`."""
    examples = [prompts.rows[row] for row in rows]
    tokens = [prompts.tokens[row] for row in rows]
    episodes = player.play(engine, examples, tokens, draws, n, params, seed)
    rollout = Rollout.from_tokens(
        prompts=[episode.prompt_ids for episode in episodes],
        completions=[episode.tokens for episode in episodes],
        logprobs=[episode.logprobs for episode in episodes],
        truncated=[episode.truncated for episode in episodes],
        groups=[draw for draw in draws for _ in range(n)],
        pad_token_id=tokenizer.pad_token_id,
        actions=[episode.trained for episode in episodes],
        dtype=dtype,
        device=device,
        supports=[episode.support for episode in episodes] if params.truncates else None,
    )
    repeated = [row for row in rows for _ in range(n)]
    columns: dict[str, list[Any]] = prompts.rows[repeated] if repeated else {}
    columns.pop("prompt", None)
    return Samples(
        rollout=rollout,
        prompts=[episode.prompt for episode in episodes],
        completions=[
            tokenizer.decode(episode.tokens, skip_special_tokens=True)
            if isinstance(episode.prompt, str)
            else episode.messages
            for episode in episodes
        ],
        completion_ids=[episode.tokens for episode in episodes],
        columns=columns,
        rows=repeated,
        episodes=episodes,
    )


def paid(episodes: Sequence[Episode]) -> Tensor:
    """(B,T) float64: what the environment of each paid, at the last token of the turn it paid for;
    NaN elsewhere, and for all of an episode that failed.
    """
    mask = padded([episode.tokens for episode in episodes], 0)[1]
    rewards = torch.full(mask.shape, math.nan, dtype=torch.float64)
    flat = [
        reward if trained else math.nan
        for episode in episodes
        for reward, trained in zip(episode.rewards, episode.trained, strict=True)
    ]
    rewards[mask] = torch.tensor(flat, dtype=torch.float64)
    return rewards


def episode_counts(samples: Samples) -> Tensor:
    """(B,4) float64 on the device of the record: turns, whether it failed, calls of tools, calls
    that failed.
    """
    counts = [
        [
            episode.turns,
            episode.error is not None,
            *_tool_counts(episode.environment),
        ]
        for episode in samples.episodes
    ]
    table = torch.tensor(counts, dtype=torch.float64, device=samples.rollout.groups.device)
    return table.view(-1, 4)


def _tool_counts(environment: Environment | None) -> tuple[int, int]:
    if isinstance(environment, ToolEnvironment):
        return environment.calls, environment.failures
    return 0, 0


def episode_metrics(counts: Tensor, tools: bool) -> dict[str, float]:
    """Over all processes, from the rows of `episode_counts`, (N,4).

    `episodes/turns` is their mean, `episodes/failed` how many have failed,
    `tools/call_frequency` is calls per episode, `tools/failure_frequency` failures per call.
    """
    turns, failed, calls, failures = counts.sum(0).tolist()
    metrics = {"episodes/turns": turns / len(counts), "episodes/failed": failed}
    if tools:
        metrics["tools/call_frequency"] = calls / len(counts)
        metrics["tools/failure_frequency"] = failures / calls if calls else math.nan
    return metrics
