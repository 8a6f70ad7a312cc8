"""The engine that samples in this process, from the policy's own weights."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.models import (
    MOST_LOST,
    evaluating,
    lost_in_merge,
    max_positions,
    merged,
    quantized,
)
from rlhf_pg.models.attention import AttentionSupport, attention_support, window
from rlhf_pg.rollout.engine import Finished, Request, RolloutEngine, SamplingParams, Session
from rlhf_pg.rollout.native.compiled import Compiled
from rlhf_pg.rollout.native.continuous_batching import MAX_ROWS, BatchingSession
from rlhf_pg.rollout.native.drafts import History
from rlhf_pg.rollout.native.hf_generate import HFGenerateSession
from rlhf_pg.rollout.native.kept import Kept, forward
from rlhf_pg.rollout.native.lean_decoder import LeanDecoder, agrees, lean_decoder
from rlhf_pg.rollout.native.stopping import Stopping

logger = logging.getLogger(__name__)


class NativeEngine(RolloutEngine):
    """An engine that generates with a `transformers` decoder in this process.

    Each prompt is computed once for all its samples. A finished row leaves the batch, and a waiting
    one takes its place. Where the model's attention cannot be replaced (an architecture that does
    not allow it, recurrent layers, a sliding window shorter than a row) it samples by `generate`,
    and logs that.

    Args:
        model: a causal language model, whose weights are used in place. With an adapter, the
            weights that it changes are copied and changed, unless they are quantized, or so coarse
            that rounding would lose the adapter: then the adapter is computed beside them.
        eos_token_ids: one id or several; each ends a row.
        pad_token_id: fills the left of shorter prompts in `generate` (never attended to).
        tokenizer: only needed for `SamplingParams.stop`.
        cache_tokens: most tokens whose keys and values are kept at a time, counting each row at its
            full length; other rows wait. None: as many as fit half of a GPU's free memory, or 4 GiB
            of a CPU's.
        drafts: whether what was sampled before is tried as a draft, on a CPU. It changes no token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: int | Iterable[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache_tokens: int | None = None,
        drafts: bool = False,
    ) -> None:
        self.model = self.weights = model
        self.history = History() if drafts else None
        self.eos_token_ids = (
            [eos_token_ids] if isinstance(eos_token_ids, int) else sorted(set(eos_token_ids))
        )
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.cache_tokens = cache_tokens
        self.pads = True  # prompts in `generate`; otherwise only equal lengths are batched
        self.together = True  # batches rows in `generate`; otherwise each is sampled alone
        self.refused: str | None = None  # why nothing is sampled in the fast way
        self.kept: dict[Any, Kept] = {}  # on a GPU, by the parameters that make steps differ
        self.lean: LeanDecoder | None = None  # of the weights as they are
        self.leans: bool | None = None  # whether there is one that agrees with the model

    @contextmanager
    def session(self, params: SamplingParams, seed: int) -> Iterator[Session]:
        """Open a session on the weights as they are now.

        Raises:
            ValueError: `stop` is set without a tokenizer; from `add`: there are no tokens, or more
                than the model has positions for.
            FloatingPointError: from `step`: the model's logits are NaN.
        """
        stopping = Stopping(self.eos_token_ids, params.stop_strings, self.tokenizer)
        with self.weights_synced(), evaluating(self.weights), torch.no_grad():
            session = _NativeSession(self, params, seed, stopping)
            try:
                yield session
            finally:
                session.close()

    @contextmanager
    def _load_weights(self) -> Iterator[None]:
        merges = isinstance(self.model, PeftModel) and not quantized(self.model)
        if merges and lost_in_merge(self.model) <= MOST_LOST:
            self.weights = merged(self.model)
        try:
            yield
        finally:
            self.weights, self.lean = self.model, None

    def decoder(self) -> Callable[..., Tensor]:
        """Return the forward pass with the weights as they are: lean, if the model is suited."""
        if self.lean is None and self.leans is not False:
            self.lean = lean_decoder(self.weights)
            if self.leans is None:
                self.leans = self.lean is not None and agrees(self.lean, self.weights)
                self.lean = self.lean if self.leans else None
        return self.lean or partial(forward, self.weights)

    def unsupported_reason(self, longest: int) -> str | None:
        """Return why rows of this many tokens cannot be sampled in the fast way, or None."""
        if self.refused is not None:
            return self.refused
        if self._window < longest:
            return f"a row of {longest} tokens is longer than its window of {self._window}"
        return self._attention_support.unsupported_reason

    @cached_property
    def _window(self) -> float:
        return window(self.model)

    @cached_property
    def _attention_support(self) -> AttentionSupport:
        return attention_support(self.weights)

    def room(self) -> int:
        """Return how many tokens there is room for, with their keys and values."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        device, room = self.model.device, 4 * 2**30
        if device.type == "cuda":  # memory that torch has reserved but does not use is free too
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            room = (torch.cuda.mem_get_info(device)[0] + unused) // 2
        return int(room // self._attention_support.bytes_per_token)

    def keeping(self, params: SamplingParams) -> Kept | None:
        """Take, on a GPU, the state that sessions with these parameters share, one at a time."""
        device = self.model.device
        if device.type != "cuda":
            return None
        key = self._key(params)
        if key in self.kept:
            return self.kept.pop(key)
        new = torch.cuda.get_device_capability(device) >= (8, 0)
        layers = self._attention_support.layers if new and self._attention_support.flash else None
        run = self._compiled if layers else forward
        return Kept(self.weights, params, MAX_ROWS, self.eos_token_ids, layers, run)

    def keep(self, params: SamplingParams, kept: Kept) -> None:
        """Keep the state for the next session with these parameters."""
        self.kept[self._key(params)] = kept

    def _key(self, params: SamplingParams) -> tuple[Any, ...]:
        cuts = (params.top_k, params.top_p, params.min_p)
        return (params.temperature, *cuts, params.max_tokens, *self.eos_token_ids)

    @cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        return Compiled(forward)


class _NativeSession:
    """A session that checks requests, and samples each in the way that its length allows."""

    def __init__(
        self, engine: NativeEngine, params: SamplingParams, seed: int, stopping: Stopping
    ) -> None:
        self.engine, self.params, self.seed, self.stopping = engine, params, seed, stopping
        self.fast: BatchingSession | None = None
        self.plain: HFGenerateSession | None = None

    def add(self, request: Request) -> None:
        self._way(self._longest(request)).add(request)

    @property
    def idle(self) -> bool:
        return all(session.idle for session in self._sessions)

    def step(self) -> list[Finished]:
        return [finished for session in self._sessions for finished in session.step()]

    def close(self) -> None:
        """Free keys and values, which the garbage collector would find too late."""
        if self.fast is not None:
            self.fast.close()
            if self.fast.kept is not None:
                self.engine.keep(self.params, self.fast.kept)
        self.fast = self.plain = None

    @property
    def _sessions(self) -> list[Session]:
        return [session for session in (self.fast, self.plain) if session is not None]

    def _longest(self, request: Request) -> int:
        """Return how many tokens a row of the request may reach."""
        if not len(request.tokens):
            raise ValueError("is empty: a model needs at least one token to continue")
        most = request.limit(self.params)
        longest, limit = len(request.tokens) + most, max_positions(self.engine.model)
        if limit and longest > limit:
            raise ValueError(
                f"has {len(request.tokens)} tokens; with max_tokens {most} that exceeds the "
                f"model's max_position_embeddings of {limit}"
            )
        return longest

    def _way(self, longest: int) -> Session:
        engine = self.engine
        common = (engine.weights, self.params, self.seed, self.stopping)
        reason = engine.unsupported_reason(longest)
        if reason is None:
            self.fast = self.fast or BatchingSession(
                *common,
                engine.room(),
                engine.decoder(),
                engine.keeping(self.params),
                engine.history,
            )
            return self.fast
        if self.plain is None:
            logger.warning("the model is sampled by generate, which is slower: %s", reason)
            options = (engine.pad_token_id, engine.cache_tokens, engine.pads, engine.together)
            self.plain = HFGenerateSession(*common, *options)
        return self.plain
