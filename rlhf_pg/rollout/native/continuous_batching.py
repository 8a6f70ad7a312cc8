"""Continuous batching: waiting prompts enter as soon as finished rows make room.

Shapes: R rows being sampled, of G prompts, at most M rows per prompt; V ids; N tokens of a pass.
Rows and prompts fill the first slots of their stores: when one leaves, the last one moves to its
slot.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.data.batch import to_device
from rlhf_pg.models.attention import Layout
from rlhf_pg.models.packing import arranged
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.native.attention import Decode, Prefill
from rlhf_pg.rollout.native.cache import COLUMNS, KeyValues, StateStore
from rlhf_pg.rollout.native.members import Members
from rlhf_pg.rollout.token_sampling import Stopping, row_key, sample, uniform

MAX_ROWS = 256  # on a CPU, or a small GPU
MEMORY_PER_ROW = 75 * 2**20  # bytes of a GPU: 1,024 rows on one of 80 GB
# Tokens that are drawn before Python looks which rows have ended. On a GPU it would wait for each.
STEPS_ON_GPU = 8
PREFILL_TOKENS = 8192  # prompt tokens in one forward pass


def most_rows(memory: float | None) -> int:
    """Return how many rows are sampled at a time with these bytes of GPU memory, or on a CPU."""
    if memory is None:
        return MAX_ROWS
    return max(MAX_ROWS, int(memory // MEMORY_PER_ROW))


@dataclass(eq=False)
class PromptState:
    """A request and its progress."""

    request: Request
    limit: int  # tokens of a completion
    waiting: deque[int]  # samples without a row
    rows: int = 0  # samples with a row
    slot: int = -1  # in the store, once the prompt is computed
    logits: Tensor | None = None  # (V,) for the first new token, while samples wait

    @property
    def length(self) -> int:
        return len(self.request.tokens)


@dataclass(eq=False)
class SampleState:
    """One sample being drawn."""

    prompt: PromptState
    sample: int
    key: int  # seed of the row's noise
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def has_ended(self) -> bool:
        return self.stopped or len(self.tokens) >= self.prompt.limit

    @property
    def over(self) -> bool:
        return self.has_ended or self.prompt.request.cancelled()

    def append(self, token: int, logprob: float, stopping: Stopping) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = stopping.ends(self.tokens, self.prompt.request.stop)

    def finished(self) -> Finished:
        completion = Completion(
            self.tokens,
            self.logprobs,
            "stop" if self.stopped else "length",
        )
        return Finished(self.prompt.request, self.sample, completion)


@dataclass(frozen=True)
class SlotAssignment:
    """The assignment of rows to prompts, unchanged until one enters or leaves."""

    members: Members
    first: Tensor  # (R,) position of each row's first new token, on the host
    keys: Tensor  # (R,) seeds of the rows' noise, on the host


@dataclass(eq=False)
class BatchingSession:
    """A `Session` on a model whose attention can be replaced.

    It keeps the keys and values of at most `cache_tokens` tokens at a time, where the states of a
    row count as `row_tokens`. A row enters if there is room for its full length, or with `grows`
    for a little more than the others have; when not all fit any more, those with the fewest tokens
    begin again.
    """

    model: PreTrainedModel
    params: SamplingParams
    seed: int
    stopping: Stopping
    cache_tokens: int
    row_tokens: int = 0
    max_rows: int = MAX_ROWS
    grows: bool = False

    def __post_init__(self) -> None:
        self.queue = deque[PromptState]()
        self.prompts = list[PromptState]()  # by slot
        self.rows = list[SampleState]()  # by slot
        spare = self.cache_tokens // 2
        self.prompt_cache = KeyValues(spare, longest=self.cache_tokens)
        self.own_cache = KeyValues(spare, longest=self.params.max_tokens)
        self.prompt_states = StateStore()
        self.own_states = StateStore()
        self._assignment: SlotAssignment | None = None
        self.ended_rows = 0
        self.ended_tokens = 0

    def add(self, request: Request) -> None:
        if request.samples:
            limit = request.limit(self.params)
            prompt = PromptState(request, limit, deque(request.samples))
            self.queue.append(prompt)

    @property
    def idle(self) -> bool:
        return not self.queue and not self.rows

    def step(self) -> list[Finished]:
        """Admit waiting samples or draw tokens, and return the completions that have finished."""
        if not self._admit() and self.rows:
            self._decode()
        return self._remove_finished()

    # ----------------------------------------------------------------------------- entering

    def _admit(self) -> bool:
        """Give waiting samples rows and first tokens, if enough can enter to be worth a pass."""
        waiting = sum(len(prompt.waiting) for prompt in self.queue)
        if not waiting:
            return False
        enough = min(waiting, 1 + len(self.rows) // 8)
        if self._room(self.queue[0], 0) < enough:
            return False
        entering = list[tuple[PromptState, int]]()
        fresh = list[PromptState]()
        while self.queue:
            prompt = self.queue[0]
            room = self._room(prompt, len(entering))
            if room < 1:
                break
            if prompt.slot < 0:
                prompt.slot = len(self.prompts)
                self.prompts.append(prompt)
            if prompt.logits is None:
                fresh.append(prompt)
            count = min(room, len(prompt.waiting))
            for _ in range(count):
                entering.append((prompt, prompt.waiting.popleft()))
            prompt.rows += count
            if not prompt.waiting:
                self.queue.popleft()
        self._prefill(fresh)
        self._enter(entering)
        return True

    def _room(self, prompt: PromptState, entering: int) -> int:
        """Return how many samples of a prompt may enter."""
        lengths = [other.length for other in self.prompts]
        if prompt.slot < 0:
            lengths.append(prompt.length)
        rows = len(self.rows) + entering
        width = self.params.max_tokens
        if self.grows:  # rows can grow by a quarter before any has to leave
            longest = self._longest
            usual = self.ended_tokens // max(self.ended_rows, 1)
            width = self._columns(max(longest + longest // 4, longest + 1, usual))
        room = min(self.max_rows, self._fitting(lengths, width)) - rows
        return room if rows else max(room, 1)  # a single row may always enter

    @property
    def _longest(self) -> int:
        """The most tokens that a row has."""
        return max((len(row.tokens) for row in self.rows), default=0)

    def _columns(self, tokens: int) -> int:
        """Return the columns of a row with so many tokens."""
        columns = -(-tokens // COLUMNS) * COLUMNS
        return min(columns, self.params.max_tokens)

    def _fitting(self, prompts: Sequence[int], width: int) -> int:
        """Return how many rows of this width fit beside prompts of these lengths."""
        of_prompts = len(prompts) * (max(prompts) + self.row_tokens)
        return (self.cache_tokens - of_prompts) // (width + self.row_tokens)

    def _prefill(self, fresh: list[PromptState]) -> None:
        """Compute the keys and values of new prompts, and the logits after each."""
        if not fresh:
            return
        longest = max(prompt.length for prompt in self.prompts)
        self.prompt_cache.reserve(len(self.prompts), longest)
        chunks = list[list[PromptState]]()
        size = PREFILL_TOKENS
        for prompt in sorted(fresh, key=lambda prompt: prompt.length):
            if size + prompt.length > PREFILL_TOKENS:
                chunks.append([])
                size = 0
            chunks[-1].append(prompt)
            size += prompt.length
        for chunk in chunks:
            tokens = list[int]()
            positions = list[int]()
            for prompt in chunk:
                tokens += prompt.request.tokens
                positions += range(prompt.length)
            lengths = [prompt.length for prompt in chunk]
            layout = Prefill(
                self.prompt_cache,
                self.prompt_states,
                [prompt.slot for prompt in chunk],
                lengths,
                self.model.device,
            )
            logits = self._forward(
                torch.tensor(tokens),
                torch.tensor(positions),
                layout,
                torch.tensor(lengths).cumsum(0) - 1,
            )
            for prompt, row in zip(chunk, logits, strict=True):
                prompt.logits = row

    def _enter(self, entering: Sequence[tuple[PromptState, int]]) -> None:
        """Draw the first token of new rows."""
        prompts = [prompt for prompt, _ in entering]
        keys = row_key(
            self.seed,
            torch.tensor([prompt.request.prompt_index for prompt in prompts]),
            torch.tensor([sample for _, sample in entering]),
        )
        new = [SampleState(*row, key) for row, key in zip(entering, keys.tolist(), strict=True)]
        slots = [prompt.slot for prompt in prompts]
        self.own_states.copy(self.prompt_states, self._indices(slots), len(self.rows))
        self.rows += new
        self.own_cache.reserve(len(self.rows), self._longest or 1)
        self._assignment = None
        logits = torch.stack([prompt.logits for prompt in prompts if prompt.logits is not None])
        first = torch.tensor([prompt.request.position for prompt in prompts])
        noise = to_device(uniform(keys, first), logits.device)
        self._append(new, [sample(logits, self.params, noise)])
        for prompt in prompts:
            if not prompt.waiting:
                prompt.logits = None

    # ------------------------------------------------------------------------------- drawing

    def _decode(self) -> None:
        """Draw one or more tokens of every row; those after a row's end are dropped."""
        device = self.model.device
        steps = 1
        if device.type == "cuda":
            left = min(row.prompt.limit - len(row.tokens) for row in self.rows)
            steps = min(left, STEPS_ON_GPU)
        if self.grows:
            self._send_back(steps)
        assignment = self._assignment or self._assign()
        self._assignment = assignment
        lengths = [len(row.tokens) for row in self.rows]
        longest = max(lengths) - 1
        self.own_cache.reserve(len(self.rows), longest + steps)
        # The columns of the newest tokens, by step.
        last = torch.tensor(lengths) + torch.arange(steps)[:, None] - 1
        noise = to_device(uniform(assignment.keys, assignment.first + last + 1), device)
        last = to_device(last, device)
        ids = to_device(torch.tensor([row.tokens[-1] for row in self.rows]), device)
        drawn = []
        for step in range(steps):
            layout = Decode(
                prompts=self.prompt_cache,
                own=self.own_cache,
                states=self.own_states,
                members=assignment.members,
                last=last[step],
                longest=longest + step,
                is_level=min(lengths) == max(lengths),
                dtype=self.model.dtype,
            )
            positions = assignment.members.lengths + last[step]
            logits = self._forward(ids, positions, layout)
            ids, logprobs = sample(logits, self.params, noise[step])
            drawn.append((ids, logprobs))
        self._append(self.rows, drawn)

    def _send_back(self, steps: int) -> None:
        """Let the rows with the fewest tokens wait again, if not all can draw so many more."""
        columns = self._columns(self._longest + steps)
        if len(self.rows) <= self._fitting([prompt.length for prompt in self.prompts], columns):
            return
        order = sorted(range(len(self.rows)), key=lambda i: -len(self.rows[i].tokens))
        staying = 0
        prompts = set[PromptState]()
        for i in order:
            prompts.add(self.rows[i].prompt)
            if self._fitting([prompt.length for prompt in prompts], columns) <= staying:
                break
            staying += 1
        leaving = sorted(order[max(staying, 1) :])
        for i in leaving:
            row = self.rows[i]
            row.prompt.waiting.append(row.sample)
            if row.prompt not in self.queue:
                self.queue.appendleft(row.prompt)
        self._leave(leaving)
        for prompt in list(self.prompts):
            if not prompt.rows:  # it makes room, and is computed again
                self._remove_prompt(prompt)
                prompt.slot = -1
                prompt.logits = None

    def _assign(self) -> SlotAssignment:
        groups: list[list[int]] = [[] for _ in self.prompts]
        for i, row in enumerate(self.rows):
            groups[row.prompt.slot].append(i)
        lengths = [prompt.length for prompt in self.prompts]
        return SlotAssignment(
            Members(groups, lengths, self.model.device),
            torch.tensor([row.prompt.request.position for row in self.rows]),
            torch.tensor([row.key for row in self.rows]),
        )

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: Layout,
        keep: Tensor | int = 0,
    ) -> Tensor:
        """Return logits (N,V) for N tokens in a packed row, or only for those in `keep`."""
        device = self.model.device
        ids = to_device(ids, device)[None]
        if isinstance(keep, Tensor):
            keep = to_device(keep, device)
        with arranged(self.model, layout):
            output = self.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),  # or some infer padding
                position_ids=to_device(positions, device)[None],
                use_cache=False,
                logits_to_keep=keep,
                layout=layout,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _append(
        self,
        rows: Sequence[SampleState],
        drawn: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Append the ids and log-probabilities (R,) of one or more steps, up to each row's end."""
        numbers = [torch.stack([ids.double(), logprobs.double()]) for ids, logprobs in drawn]
        for ids, logprobs in torch.stack(numbers).tolist():  # one copy: the host waits once
            for row, token, logprob in zip(rows, ids, logprobs, strict=True):
                if not row.has_ended:
                    row.append(int(token), logprob, self.stopping)

    # ----------------------------------------------------------------------------- leaving

    def _remove_finished(self) -> list[Finished]:
        """Remove the rows that have ended, and return their completions."""
        done = [i for i, row in enumerate(self.rows) if row.over]
        if not done:
            return []
        finished = [self.rows[i].finished() for i in done]
        self.ended_rows += len(done)
        self.ended_tokens += sum(len(self.rows[i].tokens) for i in done)
        self._leave(done)
        return finished

    def _leave(self, slots: Sequence[int]) -> None:
        """Remove rows by their ascending slots, and prompts without rows or waiting samples."""
        for i in slots:
            prompt = self.rows[i].prompt
            prompt.rows -= 1
            if not prompt.rows and not prompt.waiting:
                self._remove_prompt(prompt)
        count = len(self.rows) - len(slots)
        last = range(count, len(self.rows))
        sources = sorted(set(last) - set(slots))
        holes = [i for i in slots if i < count]
        if holes:
            moved = self._indices(sources)
            filled = self._indices(holes)
            self.own_cache.move(moved, filled)
            self.own_states.move(moved, filled)
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        del self.rows[count:]
        self._assignment = None

    def _indices(self, slots: Sequence[int]) -> Tensor:
        """Return slots as a tensor on the device, made once for all layers."""
        return to_device(torch.tensor(slots), self.model.device)

    def _remove_prompt(self, prompt: PromptState) -> None:
        last = self.prompts.pop()
        if last is not prompt:
            moved = self._indices([last.slot])
            filled = self._indices([prompt.slot])
            self.prompt_cache.move(moved, filled)
            self.prompt_states.move(moved, filled)
            self.prompts[prompt.slot] = last
            last.slot = prompt.slot
