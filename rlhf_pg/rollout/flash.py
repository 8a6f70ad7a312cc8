"""Attention in two parts by torch's own kernel for sequences of any lengths, on a GPU in 16 bits.

It reads what is there and no padding, takes fewer key heads than query heads, and returns the log of
the sum of exp(score), by which the parts are put together (FlashAttention-2; Dao 2023). That is all
that decoding needs of the packages flash-attn, kernels and FlashInfer.

Shapes: N tokens of the pass, H query and K key-value heads, D their width, S = H/K; R rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from rlhf_pg.models.attention import Heads, Layout
from rlhf_pg.rollout.attention import Weighed, together
from rlhf_pg.rollout.graphs import rounded
from rlhf_pg.rollout.rows import Prompt, Row

QUERIES = 64  # of a key head, of rows that share a prompt: a block of the kernel has 64 or 128
FEWEST = 8  # rows of a pass: so few more or less take the same time


class Tokens:
    """Keys and values of every layer, token by token, (tokens, K, D) each."""

    def __init__(self, layers: Mapping[int, Heads], device: torch.device) -> None:
        self.shapes, self.device = layers, device
        self.tokens = 0  # that there was room for at most: what grows again lies elsewhere
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens; what is there stays."""
        if self.layers and tokens <= self.tokens:
            return
        self.tokens = max(tokens, self.tokens)
        if not self.layers:
            self._allocate()
            return
        for layer, pair in self.layers.items():  # one by one: not all are there twice
            new = (self._empty(self.shapes[layer]), self._empty(self.shapes[layer]))
            for more, tensor in zip(new, pair, strict=True):
                more[: len(tensor)] = tensor
            self.layers[layer] = new

    def _allocate(self) -> None:
        """Of blocks of one size, whichever the allocator gives first, a layer gets the same again."""
        for heads in set(self.shapes.values()):
            layers = sorted(layer for layer, other in self.shapes.items() if other == heads)
            blocks = sorted((self._empty(heads) for _ in 2 * layers), key=Tensor.data_ptr)
            pairs = zip(blocks[::2], blocks[1::2], strict=True)
            self.layers |= zip(layers, pairs, strict=True)

    def _empty(self, heads: Heads) -> Tensor:
        shape = (self.tokens, heads.key_values, heads.width)
        return torch.empty(shape, dtype=heads.dtype, device=self.device)

    def write(
        self, layer: int, index: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All of a layer, after (K,N,D) keys and values have been put to these (N,) places."""
        keys, values = self.layers[layer]
        keys[index], values[index] = key.transpose(0, 1), value.transpose(0, 1)
        return keys, values

    def tensors(self) -> list[Tensor]:
        """Of all layers."""
        return [tensor for pair in self.layers.values() for tensor in pair]


@dataclass(frozen=True, kw_only=True)
class FlashPrefill:
    """Prompts one after another in a packed row, each attending to itself."""

    store: Tokens
    index: Tensor  # (N,) where their tokens are put
    bounds: Tensor  # (P+1,) int32: prompt p has the tokens from bounds[p] to bounds[p + 1]
    longest: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout`."""
        self.store.write(layer, self.index, key, value)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = _flash(q, k, v, self.bounds, self.bounds, None, self.longest, scale, causal=True)
        return out[0]


@dataclass(frozen=True)
class Places:
    """Where rows and their prompts lie; the same until a row enters or leaves.

    Rows are computed in the order of their prompts. Those that share one are cut into runs of a few,
    so that there are at most R of them, whatever the groups are, and the kernel's grid is small.
    """

    positions: Tensor  # (R,) of the first new token, by slot
    order: Tensor  # (R,) slots
    back: Tensor  # (R,) the place of each slot in `order`
    runs: Tensor  # (R+1,) int32: run i has the places from runs[i] to runs[i + 1]
    starts: Tensor  # (R+1,) int32: of the prompt of each run
    lengths: Tensor  # (R,) int32

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], rows: Sequence[Row], count: int, most: int, device: torch.device
    ) -> "Places":
        """Of so many rows, those that only fill up at the beginning of any prompt.

        Args:
            most: rows of a run.
        """
        order = sorted(range(len(rows)), key=lambda i: rows[i].prompt.slot or 0)
        runs: list[tuple[int, int, int]] = []  # rows, start and length of the prompt
        for slot, group in groupby(rows[i].prompt.slot or 0 for i in order):
            runs += _cut(len(list(group)), most, prompts[slot].start, prompts[slot].length)
        runs += _cut(count - len(rows), most, prompts[0].start, 1)
        runs += [(0, 0, 0)] * (count - len(runs))
        order += range(len(rows), count)
        back = sorted(range(count), key=order.__getitem__)
        positions = [row.prompt.length for row in rows] + [0] * (count - len(rows))
        sizes, starts, lengths = zip(*runs, strict=True)
        # One copy to the device.
        numbers = [*positions, *order, *back, 0, *accumulate(sizes), *starts, 0, *lengths]
        there = torch.tensor(numbers).to(device)
        a, b, c, *rest = there.split([count, count, count, count + 1, count + 1, count])
        return cls(a, b, c, *(x.int() for x in rest))


def _cut(rows: int, most: int, start: int, length: int) -> list[tuple[int, int, int]]:
    return [(min(most, rows - i), start, length) for i in range(0, rows, most)]


@dataclass(frozen=True, kw_only=True)
class FlashDecode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Rows are in the order of `Places`.
    """

    prompts: Tokens
    own: Tokens
    index: Tensor  # (R,) where the newest token is put
    own_starts: Tensor  # (R+1,) int32
    own_lengths: Tensor  # (R,) int32
    starts: Tensor  # see `Places`
    lengths: Tensor
    bounds: dict[int, tuple[Tensor, Tensor]]  # by S: queries of each row, and of each run

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout`."""
        heads, rows, width = key.shape
        own = self.own.write(layer, self.index, key, value)
        # Query heads that share a key head are so many more queries of it: (RS,K,D).
        q = query.view(heads, -1, rows, width).permute(2, 1, 0, 3)
        shared = q.shape[1]
        q = q.reshape(-1, heads, width)
        each, runs = self.bounds[shared]
        of_own = _weigh(q, own, each, self.own_starts, self.own_lengths, shared, scale)
        of_prompt = _weigh(q, self.prompts.layers[layer], runs, self.starts, self.lengths, max(QUERIES, shared), scale)
        out = together(of_prompt, of_own).to(query.dtype)
        return out.view(rows, shared, heads, width).transpose(1, 2).flatten(1, 2)


def _weigh(
    query: Tensor,
    store: tuple[Tensor, Tensor],
    runs: Tensor,
    starts: Tensor,
    lengths: Tensor,
    most: int,
    scale: float,
) -> Weighed:
    out, logsum = _flash(query, *store, runs, starts, lengths, most, scale)
    return Weighed(out.float(), logsum.t()[..., None])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Tensor,
    starts: Tensor,
    lengths: Tensor | None,
    most: int,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (N,H,D), and the log of the sum of exp(score) (H,N).

    Args:
        query: (N,H,D); run i has those from runs[i] to runs[i + 1], at most `most`.
        key, value: (.,K,D); those of run i begin at starts[i] and are lengths[i], or, without
            lengths, go on to starts[i + 1].
    """
    out, logsum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, runs, starts, most, key.shape[0], 0.0, causal, False,
        scale=scale, seqused_k=lengths,
    )  # fmt: skip
    return out, logsum


class Flash:
    """See `Stores`: without padding, prompts wherever there is a gap.

    Args:
        max_tokens: that a row may come to.
        layers: of the model.
    """

    fixed = True  # shapes depend on the number of rows alone

    def __init__(
        self, max_tokens: int, layers: Mapping[int, Heads], device: torch.device
    ) -> None:
        self.max_tokens, self.device = max_tokens, device
        self.prompts, self.own = Tokens(layers, device), Tokens(layers, device)
        self.shares = sorted({heads.queries // heads.key_values for heads in layers.values()})

    def size(self, rows: int) -> int:
        """See `Stores`."""
        return max(rounded(rows), FEWEST)

    def place(self, fresh: Sequence[Prompt], prompts: Sequence[Prompt]) -> None:
        """See `Stores`."""
        new = {id(prompt) for prompt in fresh}
        taken = sorted((p.start, p.start + p.length) for p in prompts if id(p) not in new)
        for prompt in fresh:
            prompt.start = _gap(taken, prompt.length)
            taken = sorted([*taken, (prompt.start, prompt.start + prompt.length)])
        self.prompts.reserve(_coarse(taken[-1][1]))

    def prefill(self, prompts: Sequence[Prompt]) -> Layout:
        """See `Stores`."""
        lengths = [prompt.length for prompt in prompts]
        index = torch.cat([torch.arange(p.start, p.start + p.length) for p in prompts])
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return FlashPrefill(
            store=self.prompts,
            index=index.to(self.device),
            bounds=bounds.to(self.device),
            longest=max(lengths),
        )

    def grow(self, rows: Sequence[Row]) -> None:
        """See `Stores`."""
        self.own.reserve(self.size(len(rows)) * self.max_tokens)

    def places(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Places:
        """See `Stores`."""
        most = max(1, QUERIES // self.shares[-1])
        return Places.of(prompts, rows, self.size(len(rows)), most, self.device)

    def layout(self, places: Places, last: Tensor, longest: int) -> Layout:
        """See `Stores`."""
        slots = torch.arange(len(last) + 1, device=last.device)
        starts = torch.where(slots < len(last), nn.functional.pad(places.order, (0, 1)), 0)
        starts = starts * self.max_tokens
        last = last[places.order]
        return FlashDecode(
            prompts=self.prompts,
            own=self.own,
            index=starts[:-1] + last,
            own_starts=starts.int(),
            own_lengths=(last + 1).int(),
            starts=places.starts,
            lengths=places.lengths,
            bounds={s: ((slots * s).int(), places.runs * s) for s in self.shares},
        )

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `Stores`."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for store in self.own.tensors():
            slots = store.view(-1, self.max_tokens, *store.shape[1:])
            slots[target] = slots[source]

    def leave(self, slot: int, last: int) -> None:
        """See `Stores`: its tokens are a gap now."""

    def lies(self) -> tuple[int, ...]:
        """See `Stores`."""
        return tuple(x.data_ptr() for x in (*self.prompts.tensors(), *self.own.tensors()))

    def close(self) -> None:
        """See `Stores`."""
        self.prompts.layers.clear()
        self.own.layers.clear()


def _gap(taken: Sequence[tuple[int, int]], length: int) -> int:
    """Where the first gap of so many tokens begins."""
    end = 0
    for start, behind in taken:
        if start - end >= length:
            break
        end = behind
    return end


def _coarse(tokens: int) -> int:
    """The next of few numbers, at most a quarter more: so the next session needs the same."""
    step = 2 ** max(tokens.bit_length() - 3, 10)
    return -(-tokens // step) * step
