"""A row: a prompt and what followed it. All data become rows, which `Batch.of` pads."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and what followed it: a completion, an episode, an agent's tree, a text.

    A calculator's episode, where the policy wrote the tokens 7 8, a tool answered 4, and the policy
    ended with 2:

        Row(
            prompt_ids=[5, 6],
            ids=[7, 8, 4, 2],
            logprobs=[-0.1, -0.3, 0.0, -0.2],
            actions=[True, True, False, True],
        )
    """

    prompt_ids: Sequence[int]
    ids: Sequence[int]  # every token after the prompt
    logprobs: Sequence[float]  # of the sampler; anything where the policy did not choose
    actions: Sequence[bool] | None = None  # which tokens the policy chose; None: all
    # The distance back to the token that each token follows, as `Batch.parent_offsets`; None: 1.
    offsets: Sequence[int] | None = None
    # Which branch of an agent's calls each token is of; see `rlhf_pg.agents.endpoint.Branch`.
    branches: Sequence[int] | None = None
    # The environment's, at the last token of a turn, and NaN elsewhere.
    rewards: Sequence[float] | None = None
    scores: Any = None  # (tokens, K) of a recorded row, as `Batch.scores`
    truncated: bool = False  # stopped by length, not by a stop token
    group: int = 0  # the prompt's index, shared by its rows
    dataset_row: int = -1
    prompt: Any = None  # as in the dataset: a string or messages
    completion: Any = None  # likewise
    columns: Mapping[str, Any] = field(default_factory=dict)  # the dataset's columns
    episode: Any = None  # what an `EpisodeRunner` played
    logged: Mapping[str, Any] = field(default_factory=dict)  # `log_extra` of reward functions

    @property
    def is_judged(self) -> bool:
        """Whether the policy chose any of its tokens; an episode that failed is not judged."""
        return bool(self.ids) if self.actions is None else any(self.actions)

    def __post_init__(self) -> None:
        for name in ("logprobs", "actions", "offsets", "branches", "rewards"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != len(self.ids):
                raise ValueError(f"{name} of a row must have one entry per token")


def sample_numbers(groups: Sequence[int]) -> list[int]:
    """Number the rows of each group from 0."""
    counts: dict[int, Iterator[int]] = defaultdict(count)
    return [next(counts[group]) for group in groups]
