"""Continuous batching, where waiting prompts enter as soon as finished rows make room.

Shapes: R rows being sampled, of G prompts; V ids.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.models.attention import configs_of, replaced_attention
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.native.choosing import Chooser
from rlhf_pg.rollout.native.close_draws import Head
from rlhf_pg.rollout.native.decode_attention import Grid, KeyValues, Spans
from rlhf_pg.rollout.native.drafter import Drafter
from rlhf_pg.rollout.native.drafts import Draft, History
from rlhf_pg.rollout.native.kept import Kept
from rlhf_pg.rollout.native.kv_cache import Padded, Stores
from rlhf_pg.rollout.native.slots import DecodeState, Prompt, Row, chunks
from rlhf_pg.rollout.native.stopping import Stopping

MAX_ROWS = 256
PREFILL_TOKENS = 8192  # of prompts, computed in one forward pass
TOKENS_PER_LOOK = 8  # on a GPU, which has to be waited for at every check for finished rows


class BatchingSession:
    """A `Session` on a model whose attention can be replaced.

    Args:
        cache_tokens: most tokens whose keys and values are kept at a time.
        forward: the model's forward pass.
        kept: on a GPU, the state that sessions share.
        history: on a CPU, what earlier sessions sampled, for drafts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        seed: int,
        stopping: Stopping,
        cache_tokens: int,
        forward: Callable[..., Tensor],
        kept: Kept | None = None,
        history: History | None = None,
    ) -> None:
        self.model, self.params, self.seed, self.stopping = model, params, seed, stopping
        self.cache_tokens, self.configs, self.kept = cache_tokens, configs_of(model), kept
        self.forward = partial(kept.forward, model) if kept else forward
        self.prefill = forward
        self.queue: deque[Prompt] = deque()
        self.prompts: list[Prompt] = []  # by slot
        self.rows: list[Row] = []  # by slot
        self.drawn = kept.drawn if kept else DecodeState(MAX_ROWS, params.max_tokens, model)
        if kept:
            kept.begin(cache_tokens)
        eos = torch.tensor(list(stopping.eos_token_ids), device=model.device)
        exact = model.device.type == "cpu" and model.dtype in (torch.float32, torch.float64)
        again, head = (forward, Head.of(model)) if exact else (None, None)
        self.chooser = Chooser(self.drawn, params, kept.eos if kept else eos, again, head)
        self.drafter = Drafter(history) if history is not None and exact else None
        self.tokens_per_look = TOKENS_PER_LOOK if model.device.type == "cuda" else 1
        self.prompt_cache = KeyValues(cache_tokens // 2, longest=cache_tokens)
        self.own_cache = Spans(cache_tokens // 2, params.max_tokens, kept is None)
        padded = Padded(self.prompt_cache, self.own_cache, model)
        self.stores: Stores = kept.stores if kept and kept.stores else padded
        self._places: Any = None  # see `Stores`

    def add(self, request: Request) -> None:
        if not request.samples:
            return
        self.queue.append(Prompt(request, request.limit(self.params), deque(request.samples)))

    @property
    def idle(self) -> bool:
        return not self.queue and not self.rows

    def step(self) -> list[Finished]:
        """Admit waiting samples or draw tokens, and return the completions that have finished.

        Raises:
            FloatingPointError: the model's logits are NaN.
        """
        with replaced_attention(self.configs):
            if not self._admit():
                left = max((row.prompt.limit - row.length for row in self.rows), default=0)
                for _ in range(min(left, self.tokens_per_look)):
                    self._decode()
        return self._take_out()

    # ----------------------------------------------------------------------------- entering

    def _admit(self) -> bool:
        """Give waiting samples rows and their first tokens, if that is worth a pass."""
        waiting = sum(len(prompt.waiting) for prompt in self.queue)
        if not waiting or self._room(self.queue[0], 0) < min(waiting, 1 + len(self.rows) // 8):
            return False
        entering: list[Row] = []
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
            taken = [prompt.waiting.popleft() for _ in range(min(room, len(prompt.waiting)))]
            entering += [Row(prompt, number) for number in taken]
            prompt.rows += len(taken)
            if not prompt.waiting:
                self.queue.popleft()
        self._compute(fresh)
        self._enter(entering)
        return True

    def _room(self, prompt: Prompt, entering: int) -> int:
        """Return how many samples of a prompt may enter, with room for their full length."""
        lengths = [other.length for other in self.prompts]
        if prompt.slot is None:
            lengths.append(prompt.length)
        rows = len(self.rows) + entering
        fitting = (self.cache_tokens - len(lengths) * max(lengths)) // self.params.max_tokens
        room = min(MAX_ROWS, fitting) - rows
        return room if rows else max(room, 1)  # a single row may always enter

    def _compute(self, fresh: list[Prompt]) -> None:
        """Compute the keys and values of new prompts, and the logits of the token after each."""
        if fresh:
            self.stores.place(fresh, self.prompts)
        for chunk in chunks(sorted(fresh, key=lambda prompt: prompt.length), PREFILL_TOKENS):
            lengths = [prompt.length for prompt in chunk]
            tensor = torch.tensor([t for p in chunk for t in p.request.tokens])
            positions = torch.cat([torch.arange(length) for length in lengths])
            device = self.model.device
            logits = self.prefill(
                tensor.to(device),
                positions.to(device),
                self.stores.prefill(chunk),
                (torch.tensor(lengths).cumsum(0) - 1).to(device),
            )
            for prompt, row in zip(chunk, logits, strict=True):
                prompt.logits = row

    def _enter(self, entering: list[Row]) -> None:
        """Draw the first token of new rows."""
        prompts = {id(row.prompt): row.prompt for row in entering}
        places = {key: i for i, key in enumerate(prompts)}
        known = [prompt.logits for prompt in prompts.values() if prompt.logits is not None]
        index = torch.tensor([places[id(row.prompt)] for row in entering])
        logits = torch.stack(known)[index.to(self.model.device)]
        start = len(self.rows)
        self.rows += entering
        self.stores.grow(self.rows)
        self.drawn.start(start, entering, self.seed)
        ids = self._draw(start, logits)
        if self.drafter is not None and self.drafter.awake:
            self.drafter.enter(entering, ids.tolist())
        for prompt in prompts.values():
            if not prompt.waiting:
                prompt.logits = None
        self._places = None

    # ------------------------------------------------------------------------------- drawing

    def _decode(self) -> None:
        """Draw one more token of every row, or several of those whose drafts are right."""
        drafter = self.drafter
        if drafter is None:
            self._one_each()
            return
        drafts = drafter.drafts(self.rows) if drafter.awake else None
        with drafter.timed(self.rows, bool(drafts)) as new:
            new += self._several(drafts) if drafts else [[token] for token in self._one_each()]

    def _one_each(self) -> list[int]:
        """Draw one more token of every row; on a GPU it is not known yet which."""
        self.stores.grow(self.rows)
        if self._places is None:
            self._places = self.stores.places(self.prompts, self.rows)
        if self.kept is None:
            return self._draw(0, self._step(self._places)[: len(self.rows)]).tolist()
        logits = self.kept.run(self._launch, self._places, self.model, self.stores)
        if logits is None:
            self._lengthen(self.rows)
        else:
            self._draw(0, logits[: len(self.rows)])
        return []

    def _launch(self, places: Any) -> Tensor | None:
        """Launch the kernels for one more token; return logits (R,V) if it is not drawn yet."""
        logits = self._step(places)
        if self.params.truncates:
            return logits
        self.chooser.choose(0, self.rows, logits)
        return None

    def _step(self, places: Any) -> Tensor:
        """Return the logits (R,V) after the newest token of every row."""
        drawn, rows = self.drawn, len(places.positions)
        last = (drawn.lengths[:rows] - 1).clamp(min=0)
        layout = self.stores.layout(places, last, max(row.length for row in self.rows))
        ids = drawn.tokens[:rows].gather(1, last[:, None]).squeeze(1)
        positions = places.positions + last
        if places.order is not None:
            ids, positions = ids[places.order], positions[places.order]
        return self.forward(ids, positions, layout, places.back)

    def _several(self, drafts: Sequence[Draft]) -> list[list[int]]:
        """Draw the next token of every row, and those after it as far as its draft agrees."""
        longest = max(row.length + len(draft) for row, draft in zip(self.rows, drafts, strict=True))
        self.stores.grow(self.rows, longest)
        if self._places is None:
            self._places = self.stores.places(self.prompts, self.rows)
        grid = Grid.of([1 + len(draft) for draft in drafts])
        last = self.drawn.lengths[: len(self.rows)] - 1
        newest = self.drawn.tokens[: len(self.rows)].gather(1, last[:, None]).tolist()
        ids = [t for new, draft in zip(newest, drafts, strict=True) for t in (*new, *draft)]
        columns = last[grid.rows] + grid.steps
        layout = self.stores.wide_layout(self._places, columns, grid, longest)
        positions = self._places.positions[grid.rows] + columns
        logits = self.forward(torch.tensor(ids), positions, layout)
        new = self.chooser.verify(self.rows, drafts, logits, grid.rows, columns + 1)
        for row, tokens in zip(self.rows, new, strict=True):
            row.length += len(tokens)
        return new

    def _draw(self, start: int, logits: Tensor) -> Tensor:
        """Draw the next token of the rows from `start` on, (R,), from (R,V)."""
        rows = self.rows[start:]
        ids = self.chooser.choose(start, rows, logits)
        self.chooser.note_support(rows, logits)
        self._lengthen(rows)
        return ids

    def _lengthen(self, rows: list[Row]) -> None:
        for row in rows:
            row.length = min(row.length + 1, row.prompt.limit)

    # ----------------------------------------------------------------------------- leaving

    def _take_out(self) -> list[Finished]:
        """Remove the rows that have ended, and return their completions."""
        lengths, ended = self.drawn.look(len(self.rows))
        if self.stopping.strings:
            self._search(lengths, ended)
        done = [i for i, row in enumerate(self.rows) if ended[i] or lengths[i] >= row.prompt.limit]
        if not done:
            return []
        finished = []
        for i, (tokens, logprobs) in zip(done, self.drawn.read(done), strict=True):
            row, length = self.rows[i], lengths[i]
            if self.drafter is not None:
                self.drafter.leave(row, tokens[:length])
            completion = Completion(
                tokens[:length],
                logprobs[:length],
                "stop" if ended[i] else "length",
                row.support[:length] or None,
            )
            finished.append(Finished(row.prompt.request, row.sample, completion))
        self._remove(done)
        return finished

    def _search(self, lengths: list[int], ended: list[bool]) -> None:
        """Cut rows after the first stop string."""
        everything = self.drawn.tokens[: len(self.rows), : max(lengths, default=0)].tolist()
        for i, row in enumerate(self.rows):
            for length in range(row.read + 1, lengths[i] + 1):
                if self.stopping.ends_text(everything[i][:length]):
                    lengths[i], ended[i] = length, True
                    break
            row.read = lengths[i]

    def _remove(self, done: list[int]) -> None:
        for prompt in [self.rows[i].prompt for i in done]:
            prompt.rows -= 1
            if not prompt.rows and not prompt.waiting:
                self._remove_prompt(prompt)
        count = len(self.rows) - len(done)
        sources = sorted(set(range(count, len(self.rows))) - set(done))
        holes = [i for i in done if i < count]
        if holes:
            self.stores.move(sources, holes)
            self.drawn.move(sources, holes)
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        del self.rows[count:]
        self.drawn.clear(count)
        self._places = None

    def _remove_prompt(self, prompt: Prompt) -> None:
        last = self.prompts.pop()
        assert prompt.slot is not None
        assert last.slot is not None
        self.stores.leave(prompt.slot, last.slot)
        if last is not prompt:
            self.prompts[prompt.slot], last.slot = last, prompt.slot

    def close(self) -> None:
        """Free the memory of keys and values."""
        self.stores.close()
