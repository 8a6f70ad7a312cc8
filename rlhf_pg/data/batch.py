"""The rows of a step, padded, to which every stage adds columns.

Shapes: B rows on this rank, P prompt width, T completion width, K sources of reward. A row is one
completion. Prompts are left-padded and completions right-padded, so every completion starts in the
same column. The completion of an agent that rewrites its history is a tree: its columns are the
distinct tokens in order of creation, and `parent_offsets` says which token each of them follows.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from rlhf_pg.data.micro_batches import RowLengths, measure_tree, split_packed, split_padded
from rlhf_pg.data.rows import Row

Fields = dict[str, Any]  # of a batch
# What `with_counts` counts.
COUNTED = {
    "prompt_ids",
    "prompt_mask",
    "completion_mask",
    "action_mask",
    "predicted",
    "groups",
    "parent_offsets",
}
DEPTHS = {"row": 1, "prompt": 2, "token": 2}  # dimensions that differ between batches, by axis


def _column(axis: str, fill: float = 0, blank: float = 0, **default: Any) -> Any:
    """Declare a tensor of a batch.

    Args:
        axis: "row" for (B,) or (B,...), "prompt" for (B,P), "token" for (B,T) or (B,T,...).
        fill: the value in padding, and in rows of a batch that lacks the tensor.
        blank: the value in a blank row, which is computed only to keep processes in step.
    """
    return field(metadata={"axis": axis, "fill": fill, "blank": blank}, **default)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows, padded; each stage of a step adds its columns.

    `select` and `blank_row`, which make micro-batches, keep tensors only.

        >>> batch = Batch.of([Row(prompt_ids=[5], ids=[7, 2], logprobs=[-0.1, -0.2]),
        ...                   Row(prompt_ids=[5, 6], ids=[8], logprobs=[-0.3])])
        >>> batch.prompt_ids, batch.completion_ids
        (tensor([[0, 5], [5, 6]]), tensor([[7, 2], [8, 0]]))
        >>> batch.action_mask
        tensor([[True, True], [True, False]])
    """

    # The rollout.
    rows: Sequence[Row] = ()  # empty in micro-batches
    prompt_ids: Tensor = _column("prompt")  # (B,P)
    prompt_mask: Tensor = _column("prompt", blank=1)  # (B,P) bool
    completion_ids: Tensor = _column("token")  # (B,T)
    # (B,T) bool; every real token, what a model may attend to
    completion_mask: Tensor = _column("token", blank=1)
    # (B,T) bool; the policy's own tokens, through EOS: those of its loss
    action_mask: Tensor = _column("token")
    # (B,T) bool; the tokens whose log-probabilities are computed; None: those of `action_mask`
    predicted: Tensor | None = _column("token", default=None)
    # (B,) int64; the prompt's index, shared by its completions; negative for rows that a term added
    # to an update (and in evaluations)
    groups: Tensor = _column("row")
    truncated: Tensor = _column("row")  # (B,) bool; stopped by length, not by a stop token
    sampler_logprobs: Tensor = _column("token")  # (B,T) from the engine
    # (B,T) int64; the distance back to the token that a token follows: 1 in a sequence, 0 for the
    # first token of a context, which is never an action. None if every row is a sequence.
    parent_offsets: Tensor | None = _column("token", fill=1, blank=1, default=None)
    # (B,T) int64; which branch of an agent's calls each token is of
    branches: Tensor | None = _column("token", default=None)

    # Results of the reward functions. (Any: type checkers cannot know which stage has passed.)
    # (B,T,K) raw, at the last token of a step or row; else NaN
    scores: Any = _column("token", fill=math.nan, default=None)

    # Results of the models before the updates; None if the algorithm does not need them.
    # (B,T) None: one update per rollout, which computes them itself (`compares_with_old`); the
    # ratio is 1
    old_logprobs: Any = _column("token", default=None)
    entropies: Tensor | None = _column("token", default=None)  # (B,T) `top_entropy_quantile`
    ref_logprobs: Any = _column("token", default=None)  # (B,T)
    # (B,T) NaN in rows without a teacher
    teacher_logprobs: Tensor | None = _column("token", fill=math.nan, default=None)
    # (B,T,H) the teacher's last hidden states
    teacher_hidden: Tensor | None = _column("token", default=None)
    values: Any = _column("token", default=None)  # (B,T) in the critic's own units
    end_values: Any = _column("row", default=None)  # (B,) of the state after the last action token

    # Results of the algorithm.
    # (B,K+1) what each source pays the row in training, and then the KL; NaN: does not apply
    totals: Any = _column("row", fill=math.nan, default=None)
    rewards: Any = _column("token", default=None)  # (B,T) per-token rewards
    advantages: Any = _column("token", default=None)  # (B,T)
    returns: Any = _column("token", default=None)  # (B,T) targets of the critic, in its units

    # For the step: greedy completions of this process, totals over all processes.
    greedy: Self | None = None  # one greedy completion per group, for a baseline
    num_prompts: int = 0  # prompts used
    other_tokens: int = 0  # tokens sampled but not trained on, prompts included
    metrics: dict[str, float] = field(default_factory=dict)
    logged_metrics: dict[str, float] = field(default_factory=dict)  # `log_metric`

    host_rows: tuple[RowLengths, ...] | None = None  # see `with_counts`

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        sources: int | None = None,
    ) -> Self:
        """Pad rows into a batch; `dtype` is that of log-probabilities and scores. Rows have scores
        if `sources`, the number of their sources, is given.
        """
        prompts = [row.prompt_ids for row in rows]
        completions = [row.ids for row in rows]
        prompt_ids, prompt_mask = pad_rows(prompts, 0, left=True)
        completion_ids, completion_mask = pad_rows(completions, 0)
        actions = numbers_of(rows, "actions", True, torch.bool)
        groups = [row.group for row in rows]
        truncated = [row.truncated for row in rows]
        columns = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "action_mask": completion_mask & actions,
            "groups": torch.tensor(groups, dtype=torch.int64),
            "truncated": torch.tensor(truncated, dtype=torch.bool),
            "sampler_logprobs": numbers_of(rows, "logprobs", 0.0, dtype),
        }
        offsets = numbers_of(rows, "offsets", 1)
        if (offsets != 1).any():
            columns["parent_offsets"] = offsets
        if any(row.branches is not None for row in rows):
            columns["branches"] = numbers_of(rows, "branches", 0)
        if sources is not None:
            scores = torch.full((*completion_ids.shape, sources), math.nan, dtype=dtype)
            for i, row in enumerate(rows):
                scores[i, : len(row.ids)] = torch.as_tensor(row.scores)
            columns["scores"] = scores
        on_device: Fields = {}
        for name, column in columns.items():
            on_device[name] = column.to(device)
        return cls(rows=rows, **on_device)

    @property
    def prompts(self) -> list[Any]:
        return [row.prompt for row in self.rows]

    @property
    def completions(self) -> list[Any]:
        return [row.completion for row in self.rows]

    @property
    def dataset_rows(self) -> list[int]:
        return [row.dataset_row for row in self.rows]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The dataset's columns, by name."""
        return columns_of([row.columns for row in self.rows])

    @property
    def logged(self) -> dict[str, list[Any]]:
        """`log_extra` of reward functions, by name."""
        return columns_of([row.logged for row in self.rows])

    @property
    def episodes(self) -> list[Any]:
        """What an `EpisodeRunner` played; empty without environment or tools."""
        return [row.episode for row in self.rows if row.episode is not None]

    def with_columns(self, **columns: Any) -> Self:
        """Return the batch with these columns added or replaced."""
        if columns.keys() & COUNTED:
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
            self.predicted_mask.sum(1),
            self.action_ends,
        ]
        columns = torch.stack(counts, dim=1)
        if self.parent_offsets is not None:
            columns = torch.cat([columns, self.parent_offsets], dim=1)
        rows = []
        for family, prompt, completion, predicted, end, *offsets in columns.tolist():
            jumps, deepest, paths = measure_tree(prompt, offsets[:completion])
            lengths = RowLengths(
                family,
                prompt,
                completion,
                predicted,
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

    @property
    def predicted_mask(self) -> Tensor:
        return self.action_mask if self.predicted is None else self.predicted

    def predicted_slots(self) -> Tensor:
        """Return (M,) int64: the indices of the predicted tokens in flattened (B,T)."""
        mask = self.predicted_mask.flatten()
        if self.host_rows is None:
            return mask.nonzero().squeeze(1)
        size = sum(row.predicted for row in self.host_rows)
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
        for name, declared, value in self._tensors():
            value = value[rows]
            if declared["axis"] == "prompt":
                value = value[:, -prompt_width:]
            elif declared["axis"] == "token":
                value = value[:, :width]
            picked[name] = value
        return type(self)(**picked, host_rows=host_rows)

    def pick(self, numbers: Sequence[int], **changes: Any) -> Self:
        """Return these rows with all that they hold, and with `changes`."""
        chosen = self.select(torch.tensor(numbers, dtype=torch.int64))
        return chosen.with_columns(rows=[self.rows[i] for i in numbers], **changes)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the rows of all parts, padded to the widest. Rows of a part that lacks a
        tensor have its fill.
        """
        joined: Fields = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            present = next((x for x in values if isinstance(x, Tensor)), None)
            if present is None or not column.metadata:
                continue
            axis = column.metadata["axis"]
            fill = column.metadata["fill"]
            for i, part in enumerate(parts):
                if values[i] is None:
                    depth = DEPTHS[axis]
                    shape = (
                        *part.completion_ids.shape[:depth],
                        *present.shape[depth:],
                    )
                    values[i] = present.new_full(shape, fill)
            if axis != "row":
                values = _pad_columns(values, fill, left=axis == "prompt")
            joined[column.name] = torch.cat(values)
        rows: list[Row] = []
        if all(len(part.rows) == part.num_rows for part in parts):
            for part in parts:
                rows += part.rows
        return cls(rows=rows, **joined)

    def blank_row(self) -> Self:
        """Return one row without action tokens, for a forward pass that adds no loss."""
        blanks: Fields = {}
        for name, declared, value in self._tensors():
            depth = DEPTHS[declared["axis"]]
            shape = [1] * depth + list(value.shape[depth:])
            blanks[name] = value.new_full(shape, declared["blank"])
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
        for split, row_numbers in ((split_packed, short), (split_padded, long)):
            index = torch.tensor(row_numbers, dtype=torch.int64)
            chosen = [rows[i] for i in row_numbers]
            for part in split(chosen, max_tokens):
                batches.append(index[part])
        return batches

    def _tensors(self) -> Iterator[tuple[str, Mapping[str, Any], Tensor]]:
        """Yield name, declaration and value of each tensor."""
        for column in fields(self):
            value = getattr(self, column.name)
            if column.metadata and value is not None:
                yield column.name, column.metadata, value


def numbers_of(
    rows: Sequence[Row],
    name: str,
    default: float,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return numbers of the tokens of rows, (B,T); `default` in padding, and for a row without."""
    lists = []
    for row in rows:
        numbers = getattr(row, name)
        if numbers is None:
            numbers = [default] * len(row.ids)
        lists.append(numbers)
    return pad_rows(lists, default, dtype=dtype)[0]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn mappings, one per row, into columns; None where a row lacks a name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


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
        span = slice(start, start + len(row))
        values[i, span] = torch.tensor(row, dtype=dtype)
        mask[i, span] = True
    return values, mask


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor without waiting for the GPU; its values must not change any more."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
