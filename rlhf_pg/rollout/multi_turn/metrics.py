"""The rewards that environments gave to a list of episodes, and metrics of the episodes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_pg.data.records import pad_rows
from rlhf_pg.rollout.multi_turn.episodes import Episode
from rlhf_pg.rollout.multi_turn.tools import ToolEnvironment


def environment_rewards(episodes: Sequence[Episode]) -> Tensor:
    """Return the rewards of the environments, (B,T) float64, at the last token of each turn.

    They are NaN elsewhere, and in all of an episode that failed.
    """
    mask = pad_rows([episode.tokens for episode in episodes], 0)[1]
    rewards = torch.full(mask.shape, math.nan, dtype=torch.float64)
    flat = [
        reward if trained else math.nan
        for episode in episodes
        for reward, trained in zip(episode.rewards, episode.trained, strict=True)
    ]
    rewards[mask] = torch.tensor(flat, dtype=torch.float64)
    return rewards


def episode_counts(episodes: Sequence[Episode], device: torch.device) -> Tensor:
    """Count turns, failure, calls of tools and failed calls of each episode, (B,4) float64."""
    counts = []
    for episode in episodes:
        environment, tools = episode.environment, [0, 0]
        if isinstance(environment, ToolEnvironment):
            tools = [environment.calls, environment.failures]
        counts.append([episode.turns, episode.error is not None, *tools])
    table = torch.tensor(counts, dtype=torch.float64, device=device)
    return table.view(-1, 4)


def episode_metrics(counts: Tensor, tools: bool) -> dict[str, float]:
    """Compute metrics over all processes from the rows of `episode_counts`, (N,4).

    `episodes/turns` is the mean number of turns, `episodes/failed` the number of failed episodes,
    `tools/call_frequency` calls per episode, `tools/failure_frequency` failures per call.
    """
    turns, failed, calls, failures = counts.sum(0).tolist()
    metrics = {"episodes/turns": turns / len(counts), "episodes/failed": failed}
    if tools:
        metrics["tools/call_frequency"] = calls / len(counts)
        metrics["tools/failure_frequency"] = failures / calls if calls else math.nan
    return metrics
