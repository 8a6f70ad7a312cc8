"""Continuous batching: waiting prompts enter as soon as finished rows make room.

Attention has two parts: over a prompt's keys and values, stored once, and over each row's own.

Shapes: R rows being sampled, of G prompts, at most M rows per prompt; V ids; N tokens of a pass, H
query and K key-value heads, D their width. Rows and prompts fill the first slots of their stores:
when one leaves, the last one moves to its slot.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from rlhf_pg.models.attention import Layout, configs_of, fused_on_cpu, replace_attention
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.token_sampling import Stopping, row_key, sample, uniform

MAX_ROWS = 256
PREFILL_TOKENS = 8192  # prompt tokens in one forward pass


@dataclass(eq=False)
class Prompt:
    """A request and its progress."""

    request: Request
    limit: int  # tokens of a completion
    waiting: deque[int]  # samples without a row
    rows: int = 0  # samples with a row
    slot: int | None = None  # in the store, once the prompt is computed
    logits: Tensor | None = None  # (V,) for the first new token, while samples wait

    @property
    def length(self) -> int:
        return len(self.request.tokens)


@dataclass(eq=False)
class Row:
    """One sample being drawn."""

    prompt: Prompt
    sample: int
    key: int  # seed of the row's noise
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def over(self) -> bool:
        full = len(self.tokens) >= self.prompt.limit
        return self.stopped or full or self.prompt.request.cancelled()

    def append(self, token: int, logprob: float, stopping: Stopping) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = stopping.ends(self.tokens, self.prompt.request.stop)

    def finished(self) -> Finished:
        completion = Completion(self.tokens, self.logprobs, "stop" if self.stopped else "length")
        return Finished(self.prompt.request, self.sample, completion)


@dataclass(frozen=True)
class Places:
    """The assignment of rows to prompts, unchanged until one enters or leaves."""

    members: Tensor  # (G,M), see `Decode`
    places: Tensor  # (R,)
    prompt_bias: Tensor  # (G,P)
    prompt_lengths: Tensor  # (R,)
    first: Tensor  # (R,) position of each row's first new token
    keys: Tensor  # (R,) seeds of the rows' noise


class BatchingSession:
    """A `Session` on a model whose attention can be replaced.

    It keeps the keys and values of at most `cache_tokens` tokens at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        seed: int,
        stopping: Stopping,
        cache_tokens: int,
    ) -> None:
        self.model, self.params, self.seed, self.stopping = model, params, seed, stopping
        self.cache_tokens, self.configs = cache_tokens, configs_of(model)
        self.queue: deque[Prompt] = deque()
        self.prompts: list[Prompt] = []  # by slot
        self.rows: list[Row] = []  # by slot
        self.prompt_cache = KeyValues(cache_tokens // 2, longest=cache_tokens)
        self.own_cache = KeyValues(cache_tokens // 2, longest=params.max_tokens)
        self._places: Places | None = None

    def add(self, request: Request) -> None:
        if request.samples:
            limit = request.limit(self.params)
            self.queue.append(Prompt(request, limit, deque(request.samples)))

    @property
    def idle(self) -> bool:
        return not self.queue and not self.rows

    def step(self) -> list[Finished]:
        """Admit waiting samples or draw tokens, and return the completions that have finished."""
        with replace_attention(self.configs):
            if not self._admit() and self.rows:
                self._decode()
        return self._remove_finished()

    # ----------------------------------------------------------------------------- entering

    def _admit(self) -> bool:
        """Give waiting samples rows and first tokens, if enough can enter to be worth a pass."""
        waiting = sum(len(prompt.waiting) for prompt in self.queue)
        if not waiting or self._room(self.queue[0], 0) < min(waiting, 1 + len(self.rows) // 8):
            return False
        entering: list[tuple[Prompt, int]] = []
        fresh: list[Prompt] = []
        while self.queue:
            prompt = self.queue[0]
            room = self._room(prompt, len(entering))
            if room < 1:
                break
            if prompt.slot is None:
                prompt.slot = len(self.prompts)
                self.prompts.append(prompt)
                fresh.append(prompt)
            for _ in range(min(room, len(prompt.waiting))):
                entering.append((prompt, prompt.waiting.popleft()))
                prompt.rows += 1
            if not prompt.waiting:
                self.queue.popleft()
        self._prefill(fresh)
        self._enter(entering)
        return True

    def _room(self, prompt: Prompt, entering: int) -> int:
        """Return how many samples of a prompt may enter with room for their full length."""
        lengths = [other.length for other in self.prompts]
        if prompt.slot is None:
            lengths.append(prompt.length)
        rows = len(self.rows) + entering
        fitting = (self.cache_tokens - len(lengths) * max(lengths)) // self.params.max_tokens
        room = min(MAX_ROWS, fitting) - rows
        return room if rows else max(room, 1)  # a single row may always enter

    def _prefill(self, fresh: list[Prompt]) -> None:
        """Compute the keys and values of new prompts, and the logits after each."""
        if not fresh:
            return
        self.prompt_cache.reserve(len(self.prompts), max(p.length for p in self.prompts))
        chunks: list[list[Prompt]] = []
        tokens = PREFILL_TOKENS
        for prompt in sorted(fresh, key=lambda prompt: prompt.length):
            if tokens + prompt.length > PREFILL_TOKENS:
                chunks.append([])
                tokens = 0
            chunks[-1].append(prompt)
            tokens += prompt.length
        for chunk in chunks:
            lengths = [prompt.length for prompt in chunk]
            slots = [prompt.slot for prompt in chunk if prompt.slot is not None]
            logits = self._forward(
                torch.tensor([token for prompt in chunk for token in prompt.request.tokens]),
                torch.cat([torch.arange(length) for length in lengths]),
                Prefill(self.prompt_cache, slots, lengths),
                torch.tensor(lengths).cumsum(0) - 1,
            )
            for prompt, row in zip(chunk, logits, strict=True):
                prompt.logits = row

    def _enter(self, entering: Sequence[tuple[Prompt, int]]) -> None:
        """Draw the first token of new rows."""
        indices = torch.tensor([prompt.request.prompt_index for prompt, _ in entering])
        keys = row_key(self.seed, indices, torch.tensor([sample for _, sample in entering]))
        new = [Row(*row, key) for row, key in zip(entering, keys.tolist(), strict=True)]
        self.rows += new
        self.own_cache.reserve(len(self.rows), max(len(row.tokens) for row in self.rows) or 1)
        self._places = None
        prompts = list(dict.fromkeys(prompt for prompt, _ in entering))
        order = {prompt: i for i, prompt in enumerate(prompts)}
        known = torch.stack([prompt.logits for prompt in prompts if prompt.logits is not None])
        index = torch.tensor([order[row.prompt] for row in new], device=known.device)
        first = torch.tensor([row.prompt.request.position for row in new])
        self._draw(new, known[index], uniform(keys, first))
        for prompt in prompts:
            if not prompt.waiting:
                prompt.logits = None

    # ------------------------------------------------------------------------------- drawing

    def _decode(self) -> None:
        """Draw one more token of every row."""
        places = self._places = self._places or self._assign()
        lengths = [len(row.tokens) for row in self.rows]
        longest = max(lengths)
        self.own_cache.reserve(len(self.rows), longest)
        drawn = torch.tensor(lengths)
        last = drawn - 1  # column of the newest token
        seen = (torch.arange(longest) <= last[:, None]).to(self.model.device)
        layout = Decode(
            prompts=self.prompt_cache,
            own=self.own_cache,
            columns=longest - 1 if longest == min(lengths) else last.to(self.model.device),
            members=places.members,
            places=places.places,
            prompt_bias=places.prompt_bias,
            own_bias=bias(seen, self.model.dtype),
        )
        newest = torch.tensor([row.tokens[-1] for row in self.rows])
        logits = self._forward(newest, places.prompt_lengths + last, layout)
        self._draw(self.rows, logits, uniform(places.keys, places.first + drawn))

    def _assign(self) -> Places:
        groups: list[list[int]] = [[] for _ in self.prompts]
        for i, row in enumerate(self.rows):
            assert row.prompt.slot is not None
            groups[row.prompt.slot].append(i)
        most = max(len(group) for group in groups)
        places = {
            row: g * most + j for g, group in enumerate(groups) for j, row in enumerate(group)
        }
        lengths = torch.tensor([prompt.length for prompt in self.prompts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        device = self.model.device
        return Places(
            torch.tensor([group + [0] * (most - len(group)) for group in groups], device=device),
            torch.tensor([places[i] for i in range(len(self.rows))], device=device),
            bias(mask, self.model.dtype).to(device),
            torch.tensor([row.prompt.length for row in self.rows]),
            torch.tensor([row.prompt.request.position for row in self.rows]),
            torch.tensor([row.key for row in self.rows]),
        )

    def _forward(
        self, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | int = 0
    ) -> Tensor:
        """Return logits (N,V) for N tokens in a packed row, or only for those in `keep`."""
        device = self.model.device
        output = self.model(
            input_ids=ids[None].to(device),
            attention_mask=torch.ones_like(ids[None]).to(device),  # or some infer padding
            position_ids=positions[None].to(device),
            use_cache=False,
            logits_to_keep=keep if isinstance(keep, int) else keep.to(device),
            layout=layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _draw(self, rows: Sequence[Row], logits: Tensor, noise: Tensor) -> None:
        """Draw the next token of each row from logits (R,V)."""
        ids, logprobs = sample(logits, self.params, noise.to(logits.device))
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.append(token, logprob, self.stopping)

    # ----------------------------------------------------------------------------- leaving

    def _remove_finished(self) -> list[Finished]:
        """Remove the rows that have ended, and return their completions."""
        done = [i for i, row in enumerate(self.rows) if row.over]
        if not done:
            return []
        finished = [self.rows[i].finished() for i in done]
        for prompt in [self.rows[i].prompt for i in done]:
            prompt.rows -= 1
            if not prompt.rows and not prompt.waiting:
                self._remove_prompt(prompt)
        count = len(self.rows) - len(done)
        sources = sorted(set(range(count, len(self.rows))) - set(done))
        holes = [i for i in done if i < count]
        if holes:
            self.own_cache.move(sources, holes)
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        del self.rows[count:]
        self._places = None
        return finished

    def _remove_prompt(self, prompt: Prompt) -> None:
        last = self.prompts.pop()
        assert prompt.slot is not None
        assert last.slot is not None
        if last is not prompt:
            self.prompt_cache.move([last.slot], [prompt.slot])
            self.prompts[prompt.slot], last.slot = last, prompt.slot


# ------------------------------------------------------------------------------------- attention


class KeyValues:
    """Keys and values of every layer in slots, (slots, K, width, D) each, with growing capacity.

    Args:
        spare: the most tokens of spare capacity.
        longest: the most tokens that a slot may hold.
    """

    def __init__(self, spare: int, longest: int) -> None:
        self.spare, self.longest = spare, longest
        self.slots = self.width = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, width: int) -> None:
        """Make room for this many slots of this many tokens, and keep their contents.

        Capacity doubles while it is small, so that gradual growth copies each number only a few
        times. When it grows in one dimension, spare capacity in the other is given back.
        """
        if slots <= self.slots and width <= self.width:
            return
        wide = -(-width // 64) * 64
        if slots > self.slots and 2 * self.slots * wide <= self.spare:
            slots = max(2 * self.slots, slots)
        if width > self.width and slots * 2 * self.width <= self.spare:
            wide = max(min(2 * self.width, self.longest), wide)
        self.slots, self.width = slots, wide
        for layer, (keys, values) in self._layers.items():  # one by one, to save memory
            self._layers[layer] = (self._resize(keys), self._resize(values))

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stores of a layer; new ones are made to fit key and value (K,N,D)."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        return self._layers[layer]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole slots over others."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[targets] = tensor[sources]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: masked slots have weight 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros(self.slots, like.shape[0], self.width, like.shape[2])

    def _resize(self, old: Tensor) -> Tensor:
        new = self._empty(old[0])
        slots, width = min(len(old), self.slots), min(old.shape[2], self.width)
        new[:slots, :, :width] = old[:slots, :, :width]
        return new


class Prefill:
    """Prompts one after another in a packed row, each attending to itself.

    Args:
        store: receives their keys and values.
        slots: the prompts' slots in the store.
        lengths: the prompts' lengths; neighbours of equal length are computed together.
    """

    def __init__(self, store: KeyValues, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.store = store
        self.runs: list[tuple[list[int], int, int]] = []  # slots, first token, length of each
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            if self.runs and self.runs[-1][2] == length:
                self.runs[-1][0].append(slot)
            else:
                self.runs.append(([slot], start, length))
            start += length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.store.of(layer, key, value)
        parts = []
        for slots, start, length in self.runs:
            q, k, v = (
                x[:, start : start + len(slots) * length]
                .reshape(x.shape[0], len(slots), length, -1)
                .transpose(0, 1)
                for x in (query, key, value)
            )
            index = torch.tensor(slots, device=q.device)
            keys[index, :, :length] = k
            values[index, :, :length] = v
            copies = q.shape[1] // k.shape[1]  # query heads that share a key head
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The newest token of every row, attending to its prompt and to its own earlier tokens.

    Row r is in slot r of `own`, prompt g in slot g of `prompts`.
    """

    prompts: KeyValues
    own: KeyValues
    columns: Tensor | int  # (R,) the column of each row's newest token, or one for all
    members: Tensor  # (G,M) the rows of each prompt, padded with any row
    places: Tensor  # (R,) the index of each row in flattened `members`
    prompt_bias: Tensor  # (G,P) `bias` for the prompts' first P columns
    own_bias: Tensor  # (R,T) `bias` for the rows' first T columns, tokens written so far

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows, heads = query.shape[1], key.shape[0]
        own_keys, own_values = self.own.of(layer, key, value)
        one = isinstance(self.columns, int)  # a slice is written faster
        index = slice(rows) if one else torch.arange(rows, device=query.device)
        own_keys[index, :, self.columns] = key.transpose(0, 1)
        own_values[index, :, self.columns] = value.transpose(0, 1)
        keys, values = self.prompts.of(layer, key, value)
        # Query heads that share a key head become additional queries of it: (R,K,H/K,D).
        q = query.view(heads, -1, rows, query.shape[2]).permute(2, 0, 1, 3)
        own = _attend(q, own_keys, own_values, self.own_bias, scale)
        of_prompt = q[self.members].transpose(1, 2)  # (G,K,M,H/K,D)
        most, shared = of_prompt.shape[2:4]
        prompt = _attend(of_prompt.flatten(2, 3), keys, values, self.prompt_bias, scale)
        back = PartialSoftmax(
            *(
                x.view(-1, heads, most, shared, x.shape[3])
                .transpose(1, 2)
                .flatten(0, 1)[self.places]
                for x in prompt
            )
        )
        return together(back, own).flatten(1, 2).to(query.dtype)


class PartialSoftmax(NamedTuple):
    """Attention over one part of the keys, for `together`; shapes (..., queries, D or 1)."""

    values: Tensor  # weighted mean
    logsum: Tensor  # log of the sum of exp(score)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an additive bias: 0 where it is True, minus infinity elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> PartialSoftmax:
    """Attend with query (B,K,Q,D) to B slots; scores are scaled, and (B,W) is added to them."""
    slots, width = bias.shape
    keys, values = keys[:slots, :, :width], values[:slots, :, :width]
    if keys.device.type == "cpu" and keys.dtype == bias.dtype and keys.shape == values.shape:
        out, logsum = fused_on_cpu(query, keys, values, attn_mask=bias[:, None, None], scale=scale)
        return PartialSoftmax(out, logsum[..., None])
    scores = torch.add(bias[:, None, None], _product(query, keys.transpose(2, 3)), alpha=scale)
    logsum = scores.logsumexp(dim=-1, keepdim=True)
    return PartialSoftmax(_product(scores.sub_(logsum).exp_(), values), logsum)


def together(a: PartialSoftmax, b: PartialSoftmax) -> Tensor:
    """Combine both parts of a softmax (online softmax; Milakov and Gimelshein 2018, section 3)."""
    return torch.lerp(a.values, b.values, torch.sigmoid(b.logsum - a.logsum))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed in at least float32; `b` is the stored tensor."""
    wide = torch.promote_types(b.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
