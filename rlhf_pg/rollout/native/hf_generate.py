"""Sampling by `generate` of `transformers`, for models whose attention cannot be replaced.

It is slower: every sample computes its prompt again, and all wait for the longest.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from rlhf_pg.data.records import pad_rows
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.native.stopping import Stopping
from rlhf_pg.rollout.token_sampling import ids_of, sample, support_mask, uniform

MAX_ROWS = 256


class HFGenerateSession:
    """A session that samples waiting requests in batches by `generate`.

    A batch has at most MAX_ROWS rows, and as many as `cache_tokens` (see `NativeEngine`) has room
    for.

    Args:
        pads: whether prompts of different lengths are sampled together, the shorter ones padded.
        together: whether to sample more than one row at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        seed: int,
        stopping: Stopping,
        pad_token_id: int,
        cache_tokens: int | None = None,
        pads: bool = True,
        together: bool = True,
    ) -> None:
        # Adapters work inside the base model; peft's `generate` would change the generation config.
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        self.params, self.seed, self.stopping = params, seed, stopping
        self.pad_token_id, self.cache_tokens = pad_token_id, cache_tokens
        self.pads, self.most = pads, MAX_ROWS if together else 1
        self.waiting: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        self.waiting += [(request, sample) for sample in request.samples]

    @property
    def idle(self) -> bool:
        return not self.waiting

    def step(self) -> list[Finished]:
        """Sample the next batch of rows to their ends."""
        if not self.waiting:
            return []
        if not self.pads:
            self.waiting.sort(key=lambda row: len(row[0].tokens))
        count = self.most
        if self.cache_tokens is not None:
            longest = max(len(request.tokens) for request, _ in self.waiting[:count])
            count = min(count, self.cache_tokens // (longest + self.params.max_tokens)) or 1
        if not self.pads:
            first = len(self.waiting[0][0].tokens)
            alike = sum(len(request.tokens) == first for request, _ in self.waiting[:count])
            count = min(count, alike)
        rows, self.waiting = self.waiting[:count], self.waiting[count:]
        chooser = _Chooser(rows, self.params, self.seed, self.stopping, self.model.device)
        device = self.model.device
        ids, mask = pad_rows([request.tokens for request, _ in rows], self.pad_token_id, left=True)
        with _plainly(self.model), torch.no_grad():
            self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.long().to(device),
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([chooser.criteria]),
                max_new_tokens=max(chooser.limits),
                do_sample=False,
            )
        return chooser.finished()


class _Chooser:
    """A logits processor that draws each token with its row's noise and leaves no other choice."""

    def __init__(
        self,
        rows: Sequence[tuple[Request, int]],
        params: SamplingParams,
        seed: int,
        stopping: Stopping,
        device: torch.device,
    ) -> None:
        self.rows, self.params, self.seed, self.stopping = rows, params, seed, stopping
        self.limits = [request.limit(params) for request, _ in rows]
        self.criteria = _AllOver(self)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.logprobs: list[list[float]] = [[] for _ in rows]
        self.supports: list[list[Tensor]] = [[] for _ in rows]
        self.lengths: list[int | None] = [None for _ in rows]  # None until a row stops
        numbers = [(r.prompt_index, number, r.position) for r, number in rows]
        self.keys = torch.tensor(numbers, device=device).T

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        prompt_indices, samples, positions = self.keys
        noise = uniform(self.seed, prompt_indices, samples, positions + len(self.tokens[0]))
        ids, logprobs = sample(scores, self.params, noise)
        for i, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True)):
            self.tokens[i].append(token)
            self.logprobs[i].append(logprob)
            length = len(self.tokens[i])
            if (
                self.lengths[i] is None
                and length <= self.limits[i]
                and self.stopping.ends(self.tokens[i])
            ):
                self.lengths[i] = length
        if self.params.truncates:
            for own, support in zip(
                self.supports, ids_of(support_mask(scores, self.params)), strict=True
            ):
                own.append(support)
        return torch.full_like(scores, -torch.inf).scatter(1, ids[:, None], 0.0)

    def finished(self) -> list[Finished]:
        results = []
        for i, (request, number) in enumerate(self.rows):
            stopped = self.lengths[i]
            length = self.limits[i] if stopped is None else stopped
            completion = Completion(
                self.tokens[i][:length],
                self.logprobs[i][:length],
                "length" if stopped is None else "stop",
                self.supports[i][:length] or None,
            )
            results.append(Finished(request, number, completion))
        return results


class _AllOver:
    """A stopping criterion that ends `generate` once every row is over."""

    def __init__(self, chooser: _Chooser) -> None:
        self.chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        done = [
            length is not None or len(tokens) >= limit
            for length, tokens, limit in zip(
                self.chooser.lengths, self.chooser.tokens, self.chooser.limits, strict=True
            )
        ]
        return torch.full((len(done),), all(done), device=input_ids.device)


@contextmanager
def _plainly(model: PreTrainedModel) -> Iterator[None]:
    """Ignore what the model's own generation config asks for, such as penalties or another end."""
    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)  # padding only follows an end
    try:
        yield
    finally:
        model.generation_config = own
