"""Sampled completions, as token ids for the learner and as text for the rewards."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.chat import whole_turn
from rlhf_pg.data.prompts import Prompts
from rlhf_pg.data.records import Rollout
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rollout import Completion, Episode, EpisodeRunner, RolloutEngine, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Samples:
    """B completions of this rank, in the order prompt * n + sample."""

    rollout: Rollout
    prompts: list[Any]  # as the dataset has them: strings or messages
    completions: list[Any]  # likewise
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]  # the dataset's other columns
    rows: list[int]  # of the dataset
    episodes: list[Episode] = field(default_factory=list)  # where there is an environment or tools

    @property
    def num_tokens(self) -> Tensor:
        """Real tokens of prompts and completions, a number on the device."""
        return self.rollout.prompt_mask.sum() + self.rollout.completion_mask.sum()

    def firsts(self) -> list[int]:
        """Return the index of the first row of every group."""
        groups = self.rollout.groups.tolist()
        return [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]

    @classmethod
    def concat(cls, parts: Sequence[Self], pad_token_id: int) -> Self:
        """Join the completions of all parts; a part may have none."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        return cls(
            rollout=Rollout.concat([part.rollout for part in parts], pad_token_id),
            prompts=_joined(part.prompts for part in parts),
            completions=_joined(part.completions for part in parts),
            completion_ids=_joined(part.completion_ids for part in parts),
            # Without rows there are no columns.
            columns={n: _joined(part.columns.get(n, []) for part in parts) for n in names},
            rows=_joined(part.rows for part in parts),
            episodes=_joined(part.episodes for part in parts),
        )

    def renumbered(self, groups: Mapping[int, int]) -> tuple[Self, Tensor]:
        """Select groups and renumber them; return them and the indices of their rows."""
        own = self.rollout.groups.tolist()
        rows = [i for i, group in enumerate(own) if group in groups]
        index = torch.tensor(rows, dtype=torch.int64, device=self.rollout.groups.device)
        numbers = index.new_tensor([groups[own[i]] for i in rows])
        samples = type(self)(
            rollout=dataclasses.replace(self.rollout.select(index), groups=numbers),
            prompts=[self.prompts[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            completion_ids=[self.completion_ids[i] for i in rows],
            columns={name: [column[i] for i in rows] for name, column in self.columns.items()},
            rows=[self.rows[i] for i in rows],
            episodes=[self.episodes[i] for i in rows] if self.episodes else [],
        )
        return samples, index

    def records(self, scores: Tensor, names: Sequence[str], count: int) -> list[dict[str, Any]]:
        """Return the first completions of `count` prompts with their total scores, for readers.

        The first `count` episodes that failed are shown, too.
        """
        total = sum_step_scores(scores).tolist()
        failed = [i for i, episode in enumerate(self.episodes) if episode.error is not None]
        return [
            {
                "prompt": self.prompts[i],
                "completion": self.completions[i],
                **{f"rewards/{name}": total[i][k] for k, name in enumerate(names)},
                **self._episode(i),
            }
            for i in sorted({*self.firsts()[:count], *failed[:count]})
        ]

    def _episode(self, i: int) -> dict[str, Any]:
        if not self.episodes:
            return {}
        return {"turns": self.episodes[i].turns, "error": self.episodes[i].error}


class ScoredSamples(NamedTuple):
    """Completions of this rank and their raw scores (B,T,K), see `Collector.score`."""

    samples: Samples
    scores: Tensor


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The completions that one step trains on; plain numbers are those of all ranks."""

    samples: Samples
    scores: Tensor  # (B,T,K) raw
    num_prompts: int  # that were taken for it
    greedy: ScoredSamples | None = None  # one greedy completion per group, for a baseline
    other_tokens: int = 0  # sampled, prompts included, and not trained on
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollout(self) -> Rollout:
        return self.samples.rollout


def sample(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    rows: Sequence[int],
    prompt_indices: Sequence[int],
    n: int,
    params: SamplingParams,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    episode_runner: EpisodeRunner | None = None,
) -> Samples:
    """Sample `n` completions of the given dataset rows, or play `n` episodes of each.

    Args:
        prompt_indices: one number per row, which keys its noise and names its group.
        dtype: of the log-probabilities.
        episode_runner: for a run with an environment or tools.
    """
    examples = [prompts.rows[row] for row in rows]
    tokens = [prompts.tokens[row] for row in rows]
    if episode_runner is None:
        sampled = engine.generate(tokens, n, params, seed, prompt_ids=prompt_indices)
        episodes = _single_turns(sampled, examples, tokens, tokenizer)
    else:
        episodes = episode_runner.play(engine, examples, tokens, prompt_indices, n, params, seed)
    rollout = Rollout.from_tokens(
        prompts=[episode.prompt_ids for episode in episodes],
        completions=[episode.tokens for episode in episodes],
        logprobs=[episode.logprobs for episode in episodes],
        truncated=[episode.truncated for episode in episodes],
        groups=[index for index in prompt_indices for _ in range(n)],
        pad_token_id=tokenizer.pad_token_id,
        actions=[episode.trained for episode in episodes],
        dtype=dtype,
        device=device,
        supports=[episode.support for episode in episodes] if params.truncates else None,
    )
    repeated = [row for row in rows for _ in range(n)]
    columns: dict[str, list[Any]] = prompts.rows[repeated] if repeated else {}
    columns.pop("prompt", None)
    said = [_said(episode, tokenizer) for episode in episodes]
    return Samples(
        rollout=rollout,
        prompts=[prompt for prompt, _ in said],
        completions=[completion for _, completion in said],
        completion_ids=[episode.tokens for episode in episodes],
        columns=columns,
        rows=repeated,
        episodes=[] if episode_runner is None else episodes,
    )


def _single_turns(
    sampled: Sequence[Completion],
    examples: Sequence[Mapping[str, Any]],
    tokens: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Episode]:
    """Wrap completions, in the order example * n + sample, as episodes of one turn."""
    episodes = []
    for i, completion in enumerate(sampled):
        place = i * len(examples) // len(sampled)
        episode = Episode(prompt=examples[place]["prompt"], prompt_ids=tokens[place])
        episode.act(completion, tokenizer.decode(completion.tokens, skip_special_tokens=True))
        episode.truncated = completion.finish_reason == "length"
        episodes.append(episode)
    return episodes


def _said(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    """Return prompt and completion, both as text or both as messages."""
    if isinstance(episode.prompt, str):
        return episode.prompt, tokenizer.decode(episode.tokens, skip_special_tokens=True)
    return whole_turn(episode.prompt, episode.messages)


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]
