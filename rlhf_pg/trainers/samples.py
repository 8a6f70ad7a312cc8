"""Sampled completions, as token ids for the learner and as text for the rewards."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.chat import whole_turn
from rlhf_pg.data.prompts import Prompts
from rlhf_pg.data.records import Rollout, sample_numbers
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.scoring import PendingCalls
from rlhf_pg.rollout import (
    Completion,
    Episode,
    EpisodeRunner,
    RolloutEngine,
    SamplingParams,
    ToolEnvironment,
)
from rlhf_pg.rollout.multi_turn.adapters.of_trl import TrlEnvironment


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
    begun: dict[int, PendingCalls] = field(default_factory=dict)  # calls of rewards, by group
    logged: dict[str, list[Any]] = field(default_factory=dict)  # columns from reward functions

    @property
    def num_tokens(self) -> Tensor:
        """Real tokens of prompts and completions, a number on the device."""
        return self.rollout.prompt_mask.sum() + self.rollout.completion_mask.sum()

    @property
    def environments(self) -> list[Any]:
        """The environment of each row as its factory made it; empty without environments."""
        made: list[Any] = [episode.environment for episode in self.episodes]
        if all(type(one) is ToolEnvironment for one in made):
            return []
        return [one.instance if type(one) is TrlEnvironment else one for one in made]

    def firsts(self) -> list[int]:
        """Return the index of the first row of every group."""
        groups = self.rollout.groups.tolist()
        return [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]

    @classmethod
    def concat(cls, parts: Sequence[Self], pad_token_id: int) -> Self:
        """Join the completions of all parts; a part may have none."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        extra = dict.fromkeys(name for part in parts for name in part.logged)
        return cls(
            rollout=Rollout.concat([part.rollout for part in parts], pad_token_id),
            prompts=_joined(part.prompts for part in parts),
            completions=_joined(part.completions for part in parts),
            completion_ids=_joined(part.completion_ids for part in parts),
            columns={
                name: _joined(part.columns.get(name, [None] * len(part.rows)) for part in parts)
                for name in names
            },
            rows=_joined(part.rows for part in parts),
            episodes=_joined(part.episodes for part in parts),
            logged={
                name: _joined(part.logged.get(name, [None] * len(part.rows)) for part in parts)
                for name in extra
            },
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
            logged={name: [column[i] for i in rows] for name, column in self.logged.items()},
        )
        return samples, index

    def records(
        self, scores: Tensor, names: Sequence[str], advantages: Sequence[float | None]
    ) -> list[dict[str, Any]]:
        """Return a record of each completion for readers, with its total scores.

        Args:
            scores: (B,T,K) raw, of the sources in `names`.
            advantages: B means over the tokens of each.
        """
        total = sum_step_scores(scores).tolist()
        groups, truncated = self.rollout.groups.tolist(), self.rollout.truncated.tolist()
        return [
            {
                "prompt_index": groups[i],
                "sample": sample,
                "prompt": self.prompts[i],
                "completion": self.completions[i],
                **{f"rewards/{name}": total[i][k] for k, name in enumerate(names)},
                "advantage": advantages[i],
                "truncated": truncated[i],
                **{name: column[i] for name, column in self.logged.items()},
                **self._episode(i),
            }
            for i, sample in enumerate(sample_numbers(groups))
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
    logged: dict[str, float] = field(default_factory=dict)  # numbers from reward functions

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
    finished: Callable[[int, list[Completion]], None] | None = None,
) -> Samples:
    """Sample `n` completions of the given dataset rows, or play `n` episodes of each.

    Args:
        prompt_indices: one number per row, which keys its noise and names its group.
        dtype: of the log-probabilities.
        episode_runner: for a run with an environment or tools.
        finished: without one, is told the place of each row in `rows`, and its completions, as
            soon as all of them are sampled.
    """
    examples, tokens = prompts.examples(rows), prompts.encoded(rows)
    prompt_ids: list[Sequence[int]]
    if episode_runner is None:
        early = {} if finished is None else {"finished": _by_prompt(n, finished)}
        turns = engine.generate(tokens, n, params, seed, prompt_ids=prompt_indices, **early)
        episodes: list[Episode] = []
        prompt_ids = [ids for ids in tokens for _ in range(n)]
        completion_ids = [list(turn.tokens) for turn in turns]
        logprobs = [turn.logprobs for turn in turns]
        actions = None
        truncated = [turn.finish_reason == "length" for turn in turns]
        given = [example["prompt"] for example in examples for _ in range(n)]
        said = prompts_and_completions(given, completion_ids, tokenizer)
    else:
        episodes = episode_runner.play(engine, examples, tokens, prompt_indices, n, params, seed)
        prompt_ids = [episode.prompt_ids for episode in episodes]
        completion_ids = [episode.tokens for episode in episodes]
        logprobs = [episode.logprobs for episode in episodes]
        actions = [episode.trained for episode in episodes]
        truncated = [episode.truncated for episode in episodes]
        said = [_prompt_and_completion(episode, tokenizer) for episode in episodes]
    rollout = Rollout.from_tokens(
        prompts=prompt_ids,
        completions=completion_ids,
        logprobs=logprobs,
        truncated=truncated,
        groups=[index for index in prompt_indices for _ in range(n)],
        pad_token_id=tokenizer.pad_token_id,
        actions=actions,
        dtype=dtype,
        device=device,
    )
    repeated = [row for row in rows for _ in range(n)]
    return Samples(
        rollout=rollout,
        prompts=[prompt for prompt, _ in said],
        completions=[completion for _, completion in said],
        completion_ids=completion_ids,
        columns=columns_of(prompts, repeated),
        rows=repeated,
        episodes=episodes,
    )


def _by_prompt(
    n: int, finished: Callable[[int, list[Completion]], None]
) -> Callable[[int, Completion], None]:
    """Return a function that takes single completions, and tells of all `n` of a prompt at once."""
    sampled: dict[int, dict[int, Completion]] = {}

    def add(index: int, completion: Completion) -> None:
        group = sampled.setdefault(index // n, {})
        group[index] = completion
        if len(group) == n:
            finished(index // n, [group[i] for i in sorted(group)])

    return add


def prompts_and_completions(
    prompts: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[tuple[Any, Any]]:
    """Return prompts with their completions of one turn, both as text or both as messages."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
    return [
        (prompt, text)
        if isinstance(prompt, str)
        else whole_turn(prompt, [{"role": "assistant", "content": text}])
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def columns_of(prompts: Prompts, rows: Sequence[int]) -> dict[str, list[Any]]:
    """Return the dataset's other columns, with an entry for each of the rows."""
    columns = prompts.columns(rows)
    columns.pop("prompt", None)
    return columns


def _prompt_and_completion(episode: Episode, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    """Return prompt and completion, both as text or both as messages."""
    if isinstance(episode.prompt, str):
        return episode.prompt, tokenizer.decode(episode.tokens, skip_special_tokens=True)
    return whole_turn(episode.prompt, episode.messages)


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]
