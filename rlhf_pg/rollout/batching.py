"""Continuous batching: prompts that wait enter as soon as there is room, rows that end leave.

Shapes: R rows being sampled, of G prompts; V ids.
"""

from collections import deque

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.models.attention import Layout, configs_of, replaced_attention
from rlhf_pg.rollout.attention import Decode, KeyValues, Prefill, bias
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.graphs import Graphs, rounded
from rlhf_pg.rollout.rows import Drawn, Groups, Prompt, Row, chunks
from rlhf_pg.rollout.sampling import ids_of, kept, sample, uniform
from rlhf_pg.rollout.stopping import Stopping

MAX_ROWS = 256
PREFILL_TOKENS = 8192  # of prompts, computed in one forward pass
TOKENS_PER_LOOK = 8  # on a GPU, which would have to wait for every look at what has ended


class BatchingSession:
    """A `Session` on a model whose attention can be replaced.

    Args:
        cache_tokens: most tokens whose keys and values are kept at a time.
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
        self.drawn = Drawn(MAX_ROWS, params.max_tokens, model)
        self.eos = torch.tensor(list(stopping.eos_token_ids), device=model.device)
        on_gpu = model.device.type == "cuda"
        self.tokens_per_look = TOKENS_PER_LOOK if on_gpu else 1
        # Shapes of few sizes, each recorded once and replayed.
        self.graphs = Graphs(self._forward) if on_gpu else None
        self.size = rounded if on_gpu else int
        self.prompt_cache = KeyValues(cache_tokens // 2, longest=cache_tokens)
        self.own_cache = KeyValues(cache_tokens // 2, longest=params.max_tokens)
        self._groups: Groups | None = None

    def add(self, request: Request) -> None:
        """See `Session`."""
        if not request.samples:
            return
        self.queue.append(Prompt(request, request.limit(self.params), deque(request.samples)))

    @property
    def idle(self) -> bool:
        """See `Session`."""
        return not self.queue and not self.rows

    def step(self) -> list[Finished]:
        """See `Session`.

        Raises:
            FloatingPointError: the model's logits are NaN.
        """
        with replaced_attention(self.configs):
            if not self._admit():
                left = max((row.prompt.limit - row.length for row in self.rows), default=0)
                for _ in range(min(left, self.tokens_per_look)):
                    self._decode()
        return self._take_out()

    # ----------------------------------------------------------------------------- coming in

    def _admit(self) -> bool:
        """Give waiting samples rows and their first tokens, if it is worth a pass."""
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
        """How many samples of a prompt may enter, each with room for all that it may become."""
        lengths = [other.length for other in self.prompts]
        if prompt.slot is None:
            lengths.append(prompt.length)
        rows = len(self.rows) + entering
        fitting = (self.cache_tokens - len(lengths) * max(lengths)) // self.params.max_tokens
        room = min(MAX_ROWS, fitting) - rows
        return room if rows else max(room, 1)  # one at a time always goes

    def _compute(self, fresh: list[Prompt]) -> None:
        """Keys and values of new prompts, and the logits of what follows them."""
        if fresh:
            room = self.size(len(self.prompts))
            self.prompt_cache.reserve(room, max(prompt.length for prompt in self.prompts))
        for chunk in chunks(sorted(fresh, key=lambda prompt: prompt.length), PREFILL_TOKENS):
            lengths = [prompt.length for prompt in chunk]
            slots = [prompt.slot for prompt in chunk if prompt.slot is not None]
            tensor = torch.tensor([t for p in chunk for t in p.request.tokens])
            positions = torch.cat([torch.arange(length) for length in lengths])
            device = self.model.device
            logits = self._forward(
                tensor.to(device),
                positions.to(device),
                Prefill(self.prompt_cache, slots, lengths),
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
        self._reserve()
        self.drawn.start(start, entering)
        self._draw(start, logits)
        for prompt in prompts.values():
            if not prompt.waiting:
                prompt.logits = None
        self._groups = None

    # ------------------------------------------------------------------------------- drawing

    def _decode(self) -> None:
        """One more token of every row."""
        if self._groups is None:
            width = self.prompt_cache.width if self.graphs else 0
            self._groups = Groups.of(self.prompts, self.rows, self.size, width, self.model)
        groups, longest = self._groups, max(row.length for row in self.rows)
        rows = len(groups.places)  # with those that only fill up
        self._reserve()
        last = (self.drawn.lengths[:rows] - 1).clamp(min=0)
        width = self.own_cache.width if self.graphs else longest
        layout = Decode(
            prompts=self.prompt_cache,
            own=self.own_cache,
            columns=_common(last),
            members=groups.members,
            places=groups.places,
            prompt_bias=groups.bias,
            own_bias=bias(
                torch.arange(width, device=last.device) <= last[:, None], self.model.dtype
            ),
        )
        ids = self.drawn.tokens[:rows].gather(1, last[:, None]).squeeze(1)
        forward = self.graphs or self._forward
        logits = forward(ids, groups.positions + last, layout)
        self._draw(0, logits[: len(self.rows)])

    def _reserve(self) -> None:
        """Room for the tokens of every row."""
        longest = max(row.length for row in self.rows)
        self.own_cache.reserve(self.size(len(self.rows)), max(longest, 1))

    def _draw(self, start: int, logits: Tensor) -> None:
        """The next token of the rows from `start` on, (R,V)."""
        drawn, rows = self.drawn, slice(start, len(self.rows))
        lengths = drawn.lengths[rows]
        positions = drawn.first[rows] + lengths
        noise = uniform(self.seed, drawn.draws[rows], drawn.samples[rows], positions)
        ids, logprobs = sample(logits, self.params, noise)
        drawn.append(rows, ids, logprobs, self.eos)
        if self.params.truncates:  # which waits for a GPU at every token
            for row, support in zip(
                self.rows[rows], ids_of(kept(logits, self.params)), strict=True
            ):
                row.support.append(support)
        for row in self.rows[rows]:
            row.length = min(row.length + 1, row.prompt.limit)

    def _forward(
        self, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits (N,V) of N tokens in a packed row, or of those that are kept."""
        output = self.model(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids[None]),  # or some models look for padding first
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            layout=layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    # ----------------------------------------------------------------------------- going out

    def _take_out(self) -> list[Finished]:
        """Remove what has ended."""
        lengths, ended = self.drawn.look(len(self.rows))
        if self.stopping.strings:
            self._search(lengths, ended)
        done = [i for i, row in enumerate(self.rows) if ended[i] or lengths[i] >= row.prompt.limit]
        if not done:
            return []
        finished = []
        for i, (tokens, logprobs) in zip(done, self.drawn.read(done), strict=True):
            row, length = self.rows[i], lengths[i]
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
        """Cut rows behind the first stop string."""
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
        self.own_cache.move(sources, holes)
        self.drawn.move(sources, holes)
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        del self.rows[count:]
        self.drawn.lengths[count:] = 0  # a row that only fills up writes to its first column
        self._groups = None

    def _remove_prompt(self, prompt: Prompt) -> None:
        last = self.prompts.pop()
        if last is not prompt:
            assert prompt.slot is not None
            assert last.slot is not None
            self.prompt_cache.move([last.slot], [prompt.slot])
            self.prompts[prompt.slot], last.slot = last, prompt.slot


def _common(columns: Tensor) -> Tensor | int:
    """The one number of which all are, on a CPU; a GPU would have to be waited for."""
    if columns.device.type == "cpu" and (columns == columns[0]).all():
        return int(columns[0])
    return columns
