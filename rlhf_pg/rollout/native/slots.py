"""The rows and prompts being sampled, and the tokens drawn so far.

Shapes: R rows being sampled, of G prompts; at most T tokens of a completion; V ids. Rows and
prompts fill the first slots: the last one takes the place of one that leaves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.rollout.engine import Request
from rlhf_pg.rollout.native.decode_attention import bias
from rlhf_pg.rollout.native.drafts import Writer
from rlhf_pg.rollout.token_sampling import row_key


@dataclass(eq=False)
class Prompt:
    """A request, and the part of it that is still to be sampled."""

    request: Request
    limit: int  # tokens of a completion
    waiting: deque[int]  # samples without a row
    rows: int = 0  # samples with a row
    slot: int | None = None  # in the store, once it has been computed
    start: int = 0  # of its tokens, in an unpadded store
    logits: Tensor | None = None  # (V,) of the first new token, while samples wait

    @property
    def length(self) -> int:
        return len(self.request.tokens)


@dataclass(eq=False)
class Row:
    """One sample being drawn."""

    prompt: Prompt
    sample: int
    length: int = 0  # tokens drawn; those after an end do not count
    read: int = 0  # tokens already searched for stop strings
    support: list[Tensor] = field(default_factory=list)  # as in `Completion`, also after an end
    writer: Writer | None = None  # where rows are drafted

    @property
    def left(self) -> int:
        """The number of tokens that may still be drawn."""
        return self.prompt.limit - self.length


class DecodeState:
    """The tokens drawn so far, by slot, on the model's device."""

    def __init__(self, rows: int, max_tokens: int, model: PreTrainedModel) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        wide = torch.promote_types(model.dtype, torch.float32)
        self.tokens = zeros(rows, max_tokens)
        self.logprobs = zeros(rows, max_tokens, dtype=wide)
        self.lengths, self.limits = zeros(rows), zeros(rows)
        self.prompt_indices, self.samples, self.first = zeros(rows), zeros(rows), zeros(rows)
        self.keys = zeros(rows)  # of the noise
        self.ended = zeros(rows, dtype=torch.bool)

    def start(self, slot: int, rows: Sequence[Row], seed: int) -> None:
        """Give the slots from `slot` on to new rows, whose noise has this seed."""
        numbers = [
            (0, r.prompt.limit, r.prompt.request.prompt_index, r.sample, r.prompt.request.position)
            for r in rows
        ]
        columns = torch.tensor(numbers).T.to(self.lengths.device)
        mine = slice(slot, slot + len(rows))
        fields = (self.lengths, self.limits, self.prompt_indices, self.samples, self.first)
        for own, values in zip(fields, columns, strict=True):
            own[mine] = values
        self.keys[mine] = row_key(seed, self.prompt_indices[mine], self.samples[mine])
        self.ended[mine] = False

    def append(self, rows: slice, ids: Tensor, logprobs: Tensor, eos: Tensor) -> None:
        """Add (R,) tokens to the rows that have not ended."""
        lengths = self.lengths[rows]
        going = ~self.ended[rows] & (lengths < self.limits[rows])
        column = lengths.clamp(max=self.tokens.shape[1] - 1)[:, None]
        for store, new in ((self.tokens[rows], ids), (self.logprobs[rows], logprobs)):
            old = store.gather(1, column).squeeze(1)
            store.scatter_(1, column, torch.where(going, new, old)[:, None])
        lengths += going
        self.ended[rows] |= going & (ids[:, None] == eos).any(dim=1)

    def extend(
        self, slots: Tensor, columns: Tensor, ids: Tensor, logprobs: Tensor, eos: Tensor
    ) -> None:
        """Write (N,) tokens after what their slots hold; the last of a slot may end it."""
        self.tokens[slots, columns] = ids
        self.logprobs[slots, columns] = logprobs
        self.lengths.index_add_(0, slots, torch.ones_like(slots))
        self.ended[slots[torch.isin(ids, eos)]] = True

    def clear(self, rows: int) -> None:
        """Make the slots from `rows` on filler rows, which write to their first column."""
        self.lengths[rows:] = self.limits[rows:] = 0

    def look(self, rows: int) -> tuple[list[int], list[bool]]:
        """Return lengths, and whether an EOS was drawn."""
        lengths, ended = torch.stack([self.lengths[:rows], self.ended[:rows]]).tolist()
        return lengths, [bool(end) for end in ended]

    def read(self, rows: list[int]) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probabilities of rows, in their whole width."""
        return list(zip(self.tokens[rows].tolist(), self.logprobs[rows].tolist(), strict=True))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots over others."""
        source, target = torch.tensor([sources, targets], device=self.lengths.device)
        for tensor in vars(self).values():
            tensor[target] = tensor[source]


@dataclass(frozen=True)
class Groups:
    """The assignment of rows to shared prompts, for `Decode`."""

    members: Tensor  # (G,M)
    places: Tensor  # (R,)
    bias: Tensor  # (R,P) of each row's prompt
    positions: Tensor  # (R,) of the first new token
    order: Tensor | None = None  # by slot
    back: Tensor | int = 0

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        rows: Sequence[Row],
        size: Callable[[int], int],
        width: int,
        model: PreTrainedModel,
    ) -> "Groups":
        """Group the rows by prompt, filling up to the next `size` with row 0 and to this width."""
        groups: list[list[int]] = [[] for _ in prompts]
        for i, row in enumerate(rows):
            assert row.prompt.slot is not None
            groups[row.prompt.slot].append(i)
        most = size(max(len(group) for group in groups))
        places = {
            row: g * most + j for g, group in enumerate(groups) for j, row in enumerate(group)
        }
        empty: list[list[int]] = [[] for _ in range(size(len(groups)) - len(groups))]
        unused = [0] * (size(len(rows)) - len(rows))
        lengths = torch.tensor([row.prompt.length for row in rows] + [1] * len(unused))
        columns = torch.arange(max([width, *(prompt.length for prompt in prompts)]))
        tensors = (
            torch.tensor([group + [0] * (most - len(group)) for group in groups + empty]),
            torch.tensor([places[i] for i in range(len(rows))] + unused),
            bias(columns < lengths[:, None], model.dtype),
            torch.tensor([row.prompt.length for row in rows] + unused),
        )
        members, of_rows, mask, positions = (tensor.to(model.device) for tensor in tensors)
        return cls(members, of_rows, mask, positions)


def chunks(prompts: Sequence[Prompt], most: int) -> list[list[Prompt]]:
    """Split prompts into runs of at most `most` tokens, or of one prompt."""
    runs: list[list[Prompt]] = []
    tokens = 0
    for prompt in prompts:
        if not runs or tokens + prompt.length > most:
            runs.append([])
            tokens = 0
        runs[-1].append(prompt)
        tokens += prompt.length
    return runs
