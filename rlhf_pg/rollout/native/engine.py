"""The engine that samples in this process, from the policy's own weights.

Models whose attention cannot be replaced use `transformers`' `generate`, which is slower: every
sample computes its prompt again, and all wait for the longest.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from rlhf_pg.data.batch import pad_rows
from rlhf_pg.models.adapters import MOST_LOST, is_quantized, merge, merge_loss
from rlhf_pg.models.attention import AttentionSupport, max_positions
from rlhf_pg.models.lm_head import bare, evaluating
from rlhf_pg.models.packing import layout_support
from rlhf_pg.rollout.engine import Finished, Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.native.continuous_batching import (
    MAX_ROWS,
    BatchingSession,
    PromptState,
    SampleState,
    most_rows,
)
from rlhf_pg.rollout.token_sampling import Stopping, row_key, sample, uniform

logger = logging.getLogger(__name__)


class NativeEngine(RolloutEngine):
    """Samples with a `transformers` decoder in this process.

    Each prompt is computed once for all its samples. A finished row leaves the batch, and a waiting
    one takes its place. `generate` is only used for attention or states in a form that the engine
    does not know, with a warning.

    Args:
        model: a causal language model, whose weights are used in place. An adapter is merged into
            copies of the weights that it changes, unless these are quantized, or so coarse that
            rounding would lose the adapter: then it is computed beside them.
        eos_token_ids: one id or several; each ends a row.
        pad_token_id: pads shorter prompts on the left in `generate` (never attended to).
        tokenizer: only needed for `SamplingParams.stop`.
        cache_tokens: most tokens whose keys and values are kept at a time, counting each row at its
            full length, or on a GPU as it grows; other rows wait. None: at most 0.8 of a GPU's free
            memory, or 4 GiB.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: int | Iterable[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        self.model = self.weights = model
        ends = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
        self.eos_token_ids = sorted(set(ends))
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.cache_tokens = cache_tokens

    @contextmanager
    def session(self, params: SamplingParams, seed: int) -> Iterator[Session]:
        """Open a session on the weights as they are now.

        ValueError if `stop` is set without a tokenizer, or a request is empty or longer than the
        model's positions allow.
        """
        stopping = Stopping(self.eos_token_ids, params.stop_strings, self.tokenizer)
        with evaluating(self.weights), torch.no_grad():
            session = _NativeSession(self, params, seed, stopping)
            try:
                yield session
            finally:
                session.sessions.clear()  # free keys and values now

    @contextmanager
    def _load_weights(self) -> Iterator[None]:
        merges = isinstance(self.model, PeftModel) and not is_quantized(self.model)
        if merges and merge_loss(self.model) <= MOST_LOST:
            self.weights = merge(self.model)
        try:
            yield
        finally:
            self.weights = self.model

    def check(self, request: Request, params: SamplingParams) -> int:
        """Return the tokens of the longest row of a request; ValueError as `Request.limit`."""
        limit = max_positions(self.model)
        what = "the model's max_position_embeddings"
        return len(request.tokens) + request.limit(params, limit, what)

    def unsupported_reason(self, longest: int) -> str | None:
        """Return why rows of this many tokens need `generate`, or None."""
        support = self._attention_support
        if support.unsupported_reason is None and support.window < longest:
            return f"a row of {longest} tokens exceeds the model's window of {support.window}"
        return support.unsupported_reason

    @cached_property
    def _attention_support(self) -> AttentionSupport:
        # Test the model whose weights are used in place: copies keep the marks of its mixers.
        model = self.model
        with evaluating(model):
            return layout_support(bare(model))

    def room(self) -> int:
        """Return the number of tokens whose keys and values fit in memory."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        device = self.model.device
        room = 4 * 2**30
        if device.type == "cuda":  # memory that torch has reserved but not allocated is free too
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            room = int(0.8 * (torch.cuda.mem_get_info(device)[0] + unused))
        return int(room // max(self._attention_support.bytes_per_token, 1))

    def max_rows(self) -> int:
        """Return how many rows are sampled at a time."""
        if self.model.device.type == "cpu":
            return most_rows(None)
        return most_rows(torch.cuda.mem_get_info(self.model.device)[1])

    def row_tokens(self) -> int:
        """Return the number of tokens whose keys and values take as much as the states of a row."""
        support = self._attention_support
        return math.ceil(support.bytes_per_row / max(support.bytes_per_token, 1))


@dataclass(eq=False)
class _NativeSession:
    """A session that checks requests, and uses `generate` for those that need it."""

    engine: NativeEngine
    params: SamplingParams
    seed: int
    stopping: Stopping
    # By whether they use `generate`.
    sessions: dict[bool, Session] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        engine = self.engine
        reason = engine.unsupported_reason(engine.check(request, self.params))
        plain = reason is not None
        if plain not in self.sessions:
            common = engine.weights, self.params, self.seed, self.stopping
            session: Session
            if plain:
                logger.warning("sampling by transformers' generate, which is slower: %s", reason)
                session = HFGenerateSession(*common, engine.pad_token_id, engine.cache_tokens)
            else:
                session = BatchingSession(
                    *common,
                    engine.room(),
                    engine.row_tokens(),
                    engine.max_rows(),
                    grows=engine.model.device.type == "cuda",
                )
            self.sessions[plain] = session
        self.sessions[plain].add(request)

    @property
    def idle(self) -> bool:
        return all(session.idle for session in self.sessions.values())

    def step(self) -> list[Finished]:
        return [finished for session in self.sessions.values() for finished in session.step()]


@dataclass(eq=False)
class HFGenerateSession:
    """A session that samples waiting requests by `generate`, as many rows as fit the cache."""

    model: PreTrainedModel
    params: SamplingParams
    seed: int
    stopping: Stopping
    pad_token_id: int
    cache_tokens: int | None = None

    def __post_init__(self) -> None:
        self.model = bare(self.model)  # peft's `generate` would change the generation config
        self.waiting = list[SampleState]()

    def add(self, request: Request) -> None:
        prompt = PromptState(request, request.limit(self.params), deque())
        samples = torch.tensor(request.samples, dtype=torch.int64)
        keys = row_key(self.seed, torch.full_like(samples, request.prompt_index), samples)
        pairs = zip(request.samples, keys.tolist(), strict=True)
        self.waiting += [SampleState(prompt, number, key) for number, key in pairs]

    @property
    def idle(self) -> bool:
        return not self.waiting

    def step(self) -> list[Finished]:
        """Sample the next batch of rows to their ends."""
        if not self.waiting:
            return []
        count = MAX_ROWS
        if self.cache_tokens is not None:
            longest = max(row.prompt.length for row in self.waiting[:count])
            count = min(count, self.cache_tokens // (longest + self.params.max_tokens)) or 1
        rows = self.waiting[:count]
        self.waiting = self.waiting[count:]
        device = self.model.device
        numbers = [(row.key, row.prompt.request.position) for row in rows]
        keys, positions = torch.tensor(numbers, device=device).T

        def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
            """Draw each token with its row's noise, and mask all others for `generate`."""
            position = positions + input_ids.shape[1] - prompts.shape[1]
            ids, logprobs = sample(scores, self.params, uniform(keys, position))
            for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
                if not row.over:
                    row.append(token, logprob, self.stopping)
            return torch.full_like(scores, -torch.inf).scatter(1, ids[:, None], 0.0)

        def all_over(input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
            return torch.full((len(rows),), all(row.over for row in rows), device=device)

        tokens = [row.prompt.request.tokens for row in rows]
        prompts, mask = pad_rows(tokens, self.pad_token_id, left=True)
        config = self.model.generation_config  # may have penalties, or another EOS
        self.model.generation_config = GenerationConfig(pad_token_id=0)  # pads after the end only
        try:
            self.model.generate(
                input_ids=prompts.to(device),
                attention_mask=mask.long().to(device),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([all_over]),
                max_new_tokens=max(row.prompt.limit for row in rows),
                do_sample=False,
            )
        finally:
            self.model.generation_config = config
        return [row.finished() for row in rows]
