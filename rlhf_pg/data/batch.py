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
from itertools import count, groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

_PROMPT_FIELDS = ("prompt_ids", "prompt_mask")
_ROW_FIELDS = (
    "groups",
    "truncated",
    "end_values",
    "positive",
)
_LISTS = (  # with one entry per row
    "prompts",
    "completions",
    "dataset_rows",
    "episodes",
)
_TABLES = ("columns", "logged")  # dicts of such lists

Jumps = tuple[tuple[int, int], ...]
Fields = dict[str, Any]  # of a batch


class RowLengths(NamedTuple):
    """The lengths of a completion and its prompt."""

    family: int  # shared by neighbours with the same group and prompt
    prompt: int  # tokens
    completion: int
    actions: int = 0  # tokens of the completion that the policy chose
    end: int = 0  # columns of the completion through its last action token
    jumps: Jumps = ()  # (column, offset) of a tree's branches; see `Batch`
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
        lengths = [len(completion) for completion in completions]
        for rows in (logprobs, actions or completions, offsets or completions):
            if list(map(len, rows)) != lengths:
                raise ValueError("a completion needs a log-probability, action, offset per token")
        prompt_ids, prompt_mask = pad_rows(prompts, pad_token_id, left=True)
        completion_ids, completion_mask = pad_rows(completions, pad_token_id)
        sampler_logprobs, _ = pad_rows(logprobs, 0.0, dtype=dtype)
        action_mask = completion_mask.clone()
        if actions is not None:
            action_mask, _ = pad_rows(actions, False, dtype=torch.bool)
        fields: Fields = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "action_mask": action_mask,
            "groups": torch.tensor(groups, dtype=torch.int64),
            "truncated": torch.tensor(truncated, dtype=torch.bool),
            "sampler_logprobs": sampler_logprobs,
        }
        if offsets is not None:
            parent_offsets, _ = pad_rows(offsets, 1)
            if (parent_offsets != 1).any():
                fields["parent_offsets"] = parent_offsets
        return cls(**{name: value.to(device) for name, value in fields.items()})

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
        lists = []
        for ids, mask in zip(self.completion_ids.cpu(), self.completion_mask.cpu(), strict=True):
            lists.append(ids[mask].tolist())
        return lists

    @property
    def width(self) -> int:
        """The number of columns of prompt and completion together."""
        return self.prompt_ids.shape[1] + self.completion_ids.shape[1]

    def lengths(self) -> Tensor:
        """Return (B,3) int64: the completion's tokens, the prompt's, whether it was truncated."""
        lengths = [
            self.completion_mask.sum(1),
            self.prompt_mask.sum(1),
            self.truncated.long(),
        ]
        return torch.stack(lengths, dim=1)

    def with_counts(self) -> Self:
        """Return the same batch with the lengths of its rows on the host.

        This waits for the GPU once, so that micro-batches and packing do not.
        """
        if self.host_rows is not None:
            return self
        if not self.num_rows:
            return dataclasses.replace(self, host_rows=())
        counts = [
            self.shared_prefixes(),
            self.prompt_mask.sum(1),
            self.completion_mask.sum(1),
            self.action_mask.sum(1),
            self.action_ends,
        ]
        columns = torch.stack(counts, dim=1)
        if self.parent_offsets is not None:
            columns = torch.cat([columns, self.parent_offsets], dim=1)
        rows = []
        for family, prompt, completion, actions, end, *offsets in columns.tolist():
            jumps, deepest, paths = _measure(prompt, offsets[:completion])
            lengths = RowLengths(
                family,
                prompt,
                completion,
                actions,
                end,
                jumps,
                deepest,
                paths,
            )
            rows.append(lengths)
        return dataclasses.replace(self, host_rows=tuple(rows))

    @property
    def action_ends(self) -> Tensor:
        """(B,) int64: the columns of each completion through its last action token, 0 without."""
        mask = self.action_mask
        columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return torch.where(mask, columns, 0).amax(1)

    def action_slots(self) -> Tensor:
        """Return (M,) int64: the indices of the action tokens in flattened (B,T)."""
        mask = self.action_mask.flatten()
        if self.host_rows is None:
            return mask.nonzero().squeeze(1)
        size = sum(row.actions for row in self.host_rows)
        return mask.nonzero_static(size=size).squeeze(1)

    def select(self, rows: Tensor) -> Self:
        """Return the tensors of these rows (int64 indices), without columns of padding only.

        For a `with_counts` batch and indices on the host, this does not wait for the GPU.
        """
        host_rows = None
        width = 1
        prompt_width = 1
        if self.host_rows is not None:
            host_rows = tuple(self.host_rows[i] for i in rows.tolist())
            for row in host_rows:
                width = max(width, row.completion)
                prompt_width = max(prompt_width, row.prompt)
        rows = to_device(rows, self.groups.device)
        if host_rows is None and len(rows):
            longest = self.lengths()[rows].amax(0)
            width, prompt_width, _ = longest.clamp(min=1).tolist()
        picked: Fields = {}
        for name, value in self._tensors():
            value = value[rows]
            if name in _PROMPT_FIELDS:
                value = value[:, -prompt_width:]
            elif name not in _ROW_FIELDS:
                value = value[:, :width]
            picked[name] = value
        return type(self)(**picked, host_rows=host_rows)

    def pick(self, rows: Sequence[int], **changes: Any) -> Self:
        """Return these rows with their texts, columns and episodes, and with `changes`."""
        picked: Fields = {}
        for name in _LISTS:
            values = getattr(self, name)
            if values:
                picked[name] = [values[i] for i in rows]
        for name in _TABLES:
            picked[name] = {}
            for key, values in getattr(self, name).items():
                picked[name][key] = [values[i] for i in rows]
        chosen = self.select(torch.tensor(rows, dtype=torch.int64))
        return chosen.with_columns(**picked, **changes)

    @classmethod
    def concat(cls, parts: Sequence[Self], pad_token_id: int) -> Self:
        """Concatenate the rows of all parts, padded to the widest.

        A column that a part lacks is None in its rows.
        """
        if any(part.parent_offsets is not None for part in parts):
            parts = [part.with_columns(parent_offsets=part.all_offsets()) for part in parts]
        fills = {
            "scores": math.nan,
            "parent_offsets": 1,
            "prompt_ids": pad_token_id,
            "completion_ids": pad_token_id,
        }
        joined: Fields = {}
        for name, _ in parts[0]._tensors():
            values = [getattr(part, name) for part in parts]
            if name not in _ROW_FIELDS:
                left = name in _PROMPT_FIELDS
                values = _pad_columns(values, fills.get(name, 0), left)
            joined[name] = torch.cat(values)
        for name in _LISTS:
            joined[name] = [x for part in parts for x in getattr(part, name)]
        for name in _TABLES:
            table: dict[str, list[Any]] = {}
            keys = dict.fromkeys(key for part in parts for key in getattr(part, name))
            for key in keys:
                table[key] = []
                for part in parts:
                    blanks = [None] * part.num_rows
                    table[key] += getattr(part, name).get(key, blanks)
            joined[name] = table
        return cls(**joined)

    def blank_row(self) -> Self:
        """Return one row without action tokens, for a forward pass that adds no loss."""

        blanks: Fields = {}
        for name, value in self._tensors():
            shape = [1]
            if name not in _ROW_FIELDS:
                shape += [1, *value.shape[2:]]
            fill = int(name in ("prompt_mask", "completion_mask", "parent_offsets"))
            blanks[name] = value.new_full(shape, fill)
        row = RowLengths(family=0, prompt=1, completion=1)
        return type(self)(**blanks, host_rows=(row,))

    @property
    def longest(self) -> int:
        """The real tokens of the longest path of a row, prompt and completion together."""
        rows = self.with_counts().host_rows or ()
        return max(row.longest for row in rows)

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
        numbers = differs.cumsum(0)
        return nn.functional.pad(numbers, (1, 0))

    def micro_batches(self, max_tokens: int, window: float = math.inf) -> list[Tensor]:
        """Split row indices, on the host, into micro-batches of at most `max_tokens`.

        Args:
            window: longest row, in tokens, that can be packed, with each prompt computed once. A
                longer row has its whole micro-batch padded, so it is kept apart.
        """
        rows = self.with_counts().host_rows or ()
        short = [i for i, row in enumerate(rows) if row.longest <= window]
        long = [i for i, row in enumerate(rows) if row.longest > window]
        batches: list[Tensor] = []
        for split, places in ((split_packed, short), (split_padded, long)):
            index = torch.tensor(places, dtype=torch.int64)
            chosen = [rows[i] for i in places]
            for part in split(chosen, max_tokens):
                batches.append(index[part])
        return batches

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value


def _measure(prompt: int, offsets: Sequence[int]) -> tuple[Jumps, int, int]:
    """Return `jumps`, `deepest` and `paths` of a row, given its prompt's length and offsets."""
    jumps = tuple((t, offset) for t, offset in enumerate(offsets) if offset != 1)
    if not jumps:
        return (), 0, 1
    followed = {*range(prompt - 1)}
    followed |= {t - offset for t, offset in enumerate(offsets, prompt) if offset}
    depths = [*range(1, prompt + 1)]
    for offset in offsets:
        depth = depths[-offset] if offset else 0
        depths.append(depth + 1)
    leaves = len(depths) - len(followed)
    return jumps, max(depths), leaves


def _pad_columns(values: Sequence[Tensor], fill: float, left: bool) -> list[Tensor]:
    """Pad tensors (rows, columns, ...) to the widest."""
    width = max(value.shape[1] for value in values)
    padded = []
    for value in values:
        missing = width - value.shape[1]
        sides = [missing, 0] if left else [0, missing]
        sides = [0, 0] * (value.ndim - 2) + sides
        padded.append(nn.functional.pad(value, sides, value=fill))
    return padded


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
    width = max([1, *map(len, rows)])
    values = torch.full((len(rows), width), pad, dtype=dtype)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        start = width - len(row) if left else 0
        place = slice(start, start + len(row))
        values[i, place] = torch.tensor(row, dtype=dtype)
        mask[i, place] = True
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
    pieces = sorted(_pieces(rows, max_tokens), key=lambda piece: -piece[0])
    for size, piece in pieces:
        place = next((i for i, left in enumerate(room) if size <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place] += piece
        room[place] -= size
    return batches


def split_padded(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches that are padded to the longest prompt and completion."""
    batches: list[list[int]] = []
    prompt = completion = paths = 0  # the longest of the last batch, and its number of paths
    longest_first = sorted(range(len(rows)), key=lambda i: -rows[i].longest)
    for i in longest_first:
        row = rows[i]
        depth = row.longest - row.prompt
        prompt = max(prompt, row.prompt)
        completion = max(completion, depth)
        paths += row.paths
        if not batches or paths * (prompt + completion) > max_tokens:
            batches.append([])
            prompt = row.prompt
            completion = depth
            paths = row.paths
        batches[-1].append(i)
    return batches


def _pieces(rows: Sequence[RowLengths], max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield families, or parts of them, with their tokens; longest completions first."""
    families = groupby(range(len(rows)), key=lambda i: rows[i].family)
    for _, run in families:
        family = list(run)
        prompt = rows[family[0]].prompt
        size = prompt
        piece = list[int]()
        family.sort(key=lambda i: -rows[i].completion)
        for i in family:
            length = rows[i].completion
            if piece and size + length > max_tokens:
                yield size, piece
                size = prompt
                piece = []
            size += length
            piece.append(i)
        yield size, piece
