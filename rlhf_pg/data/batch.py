"""The completions of a step, to which every stage adds columns, and their micro-batches.

Shapes: B rows on this rank, P prompt width, T completion width, K sources of reward. A row is one
completion. Prompts are left-padded and completions right-padded, so every completion starts in the
same column. The completion of an agent that rewrites its history is a tree: its columns are the
distinct tokens in order of creation, and `parent_offsets` says which token each of them follows.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

_PROMPT_FIELDS = ("prompt_ids", "prompt_mask")
_ROW_FIELDS = ("groups", "truncated", "end_values", "positive")
_ID_FIELDS = ("prompt_ids", "completion_ids")
_LISTS = ("prompts", "completions", "dataset_rows", "episodes")  # with one entry per row
_TABLES = ("columns", "logged")  # dicts of such lists


class RowLengths(NamedTuple):
    """The lengths of a completion and its prompt."""

    family: int  # shared by neighbours with the same group and prompt
    prompt: int  # tokens
    completion: int
    actions: int = 0  # tokens of the completion that the policy chose
    end: int = 0  # columns of the completion through its last action token
    jumps: tuple[tuple[int, int], ...] = ()  # (column, offset) of a tree's branches; see `Batch`
    deepest: int = 0  # tokens of a tree's longest path; 0 for a sequence
    paths: int = 1  # from a root to a leaf

    @property
    def longest(self) -> int:
        """The tokens of the longest path, prompt included."""
        return self.deepest or self.prompt + self.completion


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Completions with their prompts; each stage of a step adds its columns.

    `select` and `blank_row`, which make micro-batches, keep tensors only.
    """

    # The rollout.
    prompt_ids: Tensor  # (B,P)
    prompt_mask: Tensor  # (B,P) bool
    completion_ids: Tensor  # (B,T)
    completion_mask: Tensor  # (B,T) bool; every real token, what a model may attend to
    action_mask: Tensor  # (B,T) bool; the policy's own tokens, through EOS: those of its loss
    groups: Tensor  # (B,) int64; the prompt's index, shared by its completions
    truncated: Tensor  # (B,) bool; stopped by length, not by a stop token
    sampler_logprobs: Tensor  # (B,T) from the engine
    # (B,T) int64; the distance back to the token that a token follows: 1 in a sequence, 0 for the
    # first token of a context, which is never an action. None if every row is a sequence.
    parent_offsets: Tensor | None = None
    lines: Tensor | None = None  # (B,T) int64; which endpoint of an agent asked for each token
    prompts: Sequence[Any] = ()  # as in the dataset: strings or messages
    completions: Sequence[Any] = ()  # likewise
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # the dataset's columns
    dataset_rows: Sequence[int] = ()
    episodes: Sequence[Any] = ()  # from an `EpisodeRunner`; empty without environment or tools

    # Results of the reward functions. (Any: type checkers cannot know which stage has passed.)
    scores: Any = None  # (B,T,K) raw, at the last token of a step or row; else NaN
    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # `log_extra`

    # Results of the models before the updates; None if the algorithm does not need them.
    old_logprobs: Any = None  # (B,T) None: one update per rollout, the ratio is 1
    entropies: Tensor | None = None  # (B,T) see `top_entropy_quantile`
    ref_logprobs: Any = None  # (B,T)
    teacher_logprobs: Tensor | None = None  # (B,T) NaN in rows without a teacher
    teacher_hidden: Tensor | None = None  # (B,T,H) the teacher's last hidden states
    values: Any = None  # (B,T) in the critic's own units
    end_values: Any = None  # (B,) value of the state after the last action token

    # Results of the algorithm.
    rewards: Any = None  # (B,T) per-token rewards
    advantages: Any = None  # (B,T)
    returns: Any = None  # (B,T) targets of the critic, in its units
    positive: Tensor | None = None  # (B,) bool; correct, see `positive_nll_coef`

    # Totals of the step over all processes; greedy completions.
    greedy: Self | None = None  # one greedy completion per group, for a baseline
    num_prompts: int = 0  # prompts used
    other_tokens: int = 0  # tokens sampled but not trained on, prompts included
    metrics: dict[str, float] = field(default_factory=dict)
    logged_metrics: dict[str, float] = field(default_factory=dict)  # `log_metric`

    host_rows: tuple[RowLengths, ...] | None = None  # see `with_counts`

    @classmethod
    def from_tokens(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        truncated: Sequence[bool],
        groups: Sequence[int],
        pad_token_id: int,
        actions: Sequence[Sequence[bool]] | None = None,
        offsets: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Pad lists, one entry per row, into a batch; `actions` mark the tokens that the policy
        chose, by default all; `offsets` are `parent_offsets`. ValueError if a row does not have
        one number per token.
        """
        for rows in (logprobs, actions or completions, offsets or completions):
            if list(map(len, rows)) != list(map(len, completions)):
                raise ValueError("a completion needs a log-probability, action, offset per token")
        prompt_ids, prompt_mask = pad_rows(prompts, pad_token_id, left=True)
        completion_ids, completion_mask = pad_rows(completions, pad_token_id)
        action_mask = completion_mask.clone()
        if actions is not None:
            action_mask, _ = pad_rows(actions, False, dtype=torch.bool)
        fields = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "action_mask": action_mask,
            "groups": torch.tensor(groups, dtype=torch.int64),
            "truncated": torch.tensor(truncated, dtype=torch.bool),
            "sampler_logprobs": pad_rows(logprobs, 0.0, dtype=dtype)[0],
        }
        if {*chain.from_iterable(offsets or ())} - {1}:
            fields["parent_offsets"] = pad_rows(offsets or (), 1)[0]
        there: dict[str, Any] = {name: value.to(device) for name, value in fields.items()}
        return cls(**there)

    def with_columns(self, **columns: Any) -> Self:
        """Return the batch with these columns added or replaced."""
        if "action_mask" in columns:  # this changes the counted actions
            columns["host_rows"] = None
        return dataclasses.replace(self, **columns)

    @property
    def num_rows(self) -> int:
        return self.completion_ids.shape[0]

    @property
    def num_tokens(self) -> Tensor:
        """The number of real tokens of prompts and completions, on the device."""
        return self.prompt_mask.sum() + self.completion_mask.sum()

    def token_lists(self) -> list[list[int]]:
        rows = zip(self.completion_ids.cpu(), self.completion_mask.cpu(), strict=True)
        return [ids[mask].tolist() for ids, mask in rows]

    @property
    def width(self) -> int:
        """The number of columns of prompt and completion together."""
        return self.prompt_ids.shape[1] + self.completion_ids.shape[1]

    def lengths(self) -> Tensor:
        """Return (B,3) int64: the completion's tokens, the prompt's, whether it was truncated."""
        lengths = [self.completion_mask.sum(1), self.prompt_mask.sum(1), self.truncated.long()]
        return torch.stack(lengths, dim=1)

    def with_counts(self) -> Self:
        """Return the same batch with the lengths of its rows on the host.

        This waits for the GPU once, so that micro-batches and packing do not.
        """
        if self.host_rows is not None:
            return self
        if not self.num_rows:
            return dataclasses.replace(self, host_rows=())
        lengths = [*self.lengths()[:, [1, 0]].T, self.action_mask.sum(1), self.action_ends]
        columns = torch.stack([self.shared_prefixes(), *lengths], dim=1)
        if self.parent_offsets is not None:
            columns = torch.cat([columns, self.parent_offsets], dim=1)
        rows = tuple(
            RowLengths._make([*row[:5], *_measure(row[1], row[5 : 5 + row[2]])])
            for row in columns.tolist()
        )
        return dataclasses.replace(self, host_rows=rows)

    @property
    def action_ends(self) -> Tensor:
        """(B,) int64: the columns of each completion through its last action token, 0 without."""
        columns = torch.arange(1, self.action_mask.shape[1] + 1, device=self.action_mask.device)
        return torch.where(self.action_mask, columns, 0).amax(1)

    def action_slots(self) -> Tensor:
        """Return (M,) int64: the indices of the action tokens in flattened (B,T)."""
        mask = self.action_mask.flatten()
        if self.host_rows is None:
            return mask.nonzero().squeeze(1)
        return mask.nonzero_static(size=sum(row.actions for row in self.host_rows)).squeeze(1)

    def select(self, rows: Tensor) -> Self:
        """Return the tensors of these rows (int64 indices), without columns of padding only.

        For a `with_counts` batch and indices on the host, this does not wait for the GPU.
        """
        host_rows = self.host_rows and tuple(self.host_rows[i] for i in rows.tolist())
        rows = to_device(rows, self.groups.device)
        if host_rows is None:
            longest = self.lengths()[rows].amax(0).tolist() if len(rows) else (0, 0)
            width = longest[0] or 1
            prompt_width = longest[1] or 1
        else:
            prompt_width = max((row.prompt for row in host_rows), default=0) or 1
            width = max((row.completion for row in host_rows), default=0) or 1

        def pick(name: str, value: Tensor) -> Tensor:
            value = value[rows]
            if name in _ROW_FIELDS:
                return value
            if name in _PROMPT_FIELDS:
                return value[:, -prompt_width:]
            return value[:, :width]

        picked: dict[str, Any] = {name: pick(name, value) for name, value in self._tensors()}
        return type(self)(**picked, host_rows=host_rows)

    def pick(self, rows: Sequence[int], **changes: Any) -> Self:
        """Return these rows with their texts, columns and episodes, and with `changes`."""
        lists = {name: [x[i] for i in rows] for name in _LISTS if (x := getattr(self, name))}
        tables = {
            name: {key: [x[i] for i in rows] for key, x in getattr(self, name).items()}
            for name in _TABLES
        }
        chosen = self.select(torch.tensor(rows, dtype=torch.int64))
        return chosen.with_columns(**lists, **tables, **changes)

    @classmethod
    def concat(cls, parts: Sequence[Self], pad_token_id: int) -> Self:
        """Concatenate the rows of all parts, padded to the widest.

        A column that a part lacks is None in its rows.
        """
        if any(part.parent_offsets is not None for part in parts):
            parts = [part.with_columns(parent_offsets=part.all_offsets()) for part in parts]
        fills = {"scores": math.nan, "parent_offsets": 1, **dict.fromkeys(_ID_FIELDS, pad_token_id)}

        def join(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            if name in _ROW_FIELDS:
                return torch.cat(values)
            width = max(value.shape[1] for value in values)
            left = name in _PROMPT_FIELDS
            padded = []
            for value in values:
                missing = width - value.shape[1]
                sides = (0, 0) * (value.ndim - 2) + ((missing, 0) if left else (0, missing))
                padded.append(nn.functional.pad(value, sides, value=fills.get(name, 0)))
            return torch.cat(padded)

        def table(name: str) -> dict[str, list[Any]]:
            keys = dict.fromkeys(key for part in parts for key in getattr(part, name))
            return {
                key: [x for p in parts for x in getattr(p, name).get(key, [None] * p.num_rows)]
                for key in keys
            }

        joined: dict[str, Any] = {name: join(name) for name, _ in parts[0]._tensors()}
        joined |= {name: [x for part in parts for x in getattr(part, name)] for name in _LISTS}
        joined |= {name: table(name) for name in _TABLES}
        return cls(**joined)

    def blank_row(self) -> Self:
        """Return one row without action tokens, for a forward pass that adds no loss."""

        def blank(name: str, value: Tensor) -> Tensor:
            shape = (1,) if name in _ROW_FIELDS else (1, 1, *value.shape[2:])
            filled = {"prompt_mask": 1, "completion_mask": 1, "parent_offsets": 1}
            return torch.full(shape, filled.get(name, 0), dtype=value.dtype, device=value.device)

        row = RowLengths(family=0, prompt=1, completion=1, actions=0)
        blanks: dict[str, Any] = {name: blank(name, value) for name, value in self._tensors()}
        return type(self)(**blanks, host_rows=(row,))

    @property
    def longest(self) -> int:
        """The real tokens of the longest path of a row, prompt and completion together."""
        return max(row.longest for row in self.with_counts().host_rows or ())

    def all_offsets(self) -> Tensor:
        """Return `parent_offsets`, also where every row is a sequence."""
        offsets = self.parent_offsets
        if offsets is None:
            return torch.ones_like(self.completion_ids)
        return offsets

    def shared_prefixes(self) -> Tensor:
        """Number the shared prefixes, (B,) int64 from 0: neighbours with the same group and prompt
        share one.

        (An environment may give the episodes of a group different prompts.)
        """
        prompts = torch.where(self.prompt_mask, self.prompt_ids, -1)
        columns = torch.cat([self.groups[:, None], prompts], dim=1)
        differs = (columns[1:] != columns[:-1]).any(1)
        return nn.functional.pad(differs.cumsum(0), (1, 0))

    def micro_batches(self, max_tokens: int, window: float = math.inf) -> list[Tensor]:
        """Split row indices, on the host, into micro-batches of at most `max_tokens`.

        Args:
            window: longest row, in tokens, that can be packed, with each prompt computed once. A
                longer row has its whole micro-batch padded, so it is kept apart.
        """
        rows = self.with_counts().host_rows or ()
        batches: list[Tensor] = []
        for split, is_long in ((split_packed, False), (split_padded, True)):
            places = [i for i, row in enumerate(rows) if (row.longest > window) == is_long]
            index = torch.tensor(places, dtype=torch.int64)
            batches += [index[part] for part in split([rows[i] for i in places], max_tokens)]
        return batches

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, x) for name, x in vars(self).items() if isinstance(x, Tensor))


def _measure(prompt: int, offsets: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Return `jumps`, `deepest` and `paths` of a row, given its prompt's length and offsets."""
    jumps = tuple((t, offset) for t, offset in enumerate(offsets) if offset != 1)
    if not jumps:
        return (), 0, 1
    followed = {t - offset for t, offset in enumerate(offsets, prompt) if offset}
    depths = list(range(1, prompt + 1))
    for offset in offsets:
        depths.append(depths[-offset] + 1 if offset else 1)
    return jumps, max(depths), len(depths) - len(followed.union(range(prompt - 1)))


def sample_numbers(groups: Sequence[int]) -> list[int]:
    """Number the rows of each group from 0."""
    counts: dict[int, Iterator[int]] = defaultdict(count)
    return [next(counts[group]) for group in groups]


def pad_rows(
    rows: Sequence[Sequence[float]],
    pad: float,
    left: bool = False,
    dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Return values and mask, (B, widest row); at least one column, so that B = 0 stays 2-D."""
    width = max((len(row) for row in rows), default=0) or 1
    values = torch.full((len(rows), width), pad, dtype=dtype)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(len(row))
        values[i, where] = torch.tensor(row, dtype=dtype)
        mask[i, where] = True
    return values, mask


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor without waiting for the GPU; its values must not change any more."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def split_packed(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches of row indices without padding.

    A prompt is computed once for all rows of its family in a batch. A row that does not fit
    `max_tokens` alone is a batch of its own; a family that does not fit is split.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    # First-fit decreasing: at most 11/9 of the minimal number of batches (Johnson 1973).
    for size, own in sorted(_pieces(rows, max_tokens), key=lambda piece: -piece[0]):
        place = next((i for i, left in enumerate(room) if size <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place] += own
        room[place] -= size
    return batches


def split_padded(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches that are padded to the longest prompt and completion."""
    batches: list[list[int]] = []
    prompt = completion = paths = 0  # the longest of the last batch, and its number of paths
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].longest):
        own = rows[i].prompt, rows[i].longest - rows[i].prompt
        prompt = max(prompt, own[0])
        completion = max(completion, own[1])
        paths += rows[i].paths
        if not batches or paths * (prompt + completion) > max_tokens:
            batches.append([])
            (prompt, completion), paths = own, rows[i].paths
        batches[-1].append(i)
    return batches


def _pieces(rows: Sequence[RowLengths], max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield families, or parts of them, with their tokens; longest completions first."""
    for _, run in groupby(range(len(rows)), key=lambda i: rows[i].family):
        family = list(run)
        prompt = rows[family[0]].prompt
        size = prompt
        piece = list[int]()
        for i in sorted(family, key=lambda i: -rows[i].completion):
            if piece and size + rows[i].completion > max_tokens:
                yield size, piece
                size = prompt
                piece = []
            size += rows[i].completion
            piece.append(i)
        yield size, piece
