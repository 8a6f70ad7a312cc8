"""Sampling by `generate` of `transformers`, for models whose attention cannot be replaced.

It is slower: every sample computes its prompt again, and all wait for the longest.
"""

from collections.abc import Iterator
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

from rlhf_pg.data.batch import pad_rows
from rlhf_pg.rollout.engine import Completion, Finished, Request, SamplingParams
from rlhf_pg.rollout.token_sampling import Stopping, sample, uniform

MAX_ROWS = 256


class HFGenerateSession:
    """A session that samples waiting requests in batches by `generate`.

    A batch has at most MAX_ROWS rows, and as many as `cache_tokens` (see `NativeEngine`) has room
    for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        seed: int,
        stopping: Stopping,
        pad_token_id: int,
        cache_tokens: int | None = None,
    ) -> None:
        # Adapters work inside the base model; peft's `generate` would change the generation config.
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        self.params, self.seed, self.stopping = params, seed, stopping
        self.pad_token_id, self.cache_tokens = pad_token_id, cache_tokens
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
        count = MAX_ROWS
        if self.cache_tokens is not None:
            longest = max(len(request.tokens) for request, _ in self.waiting[:count])
            count = min(count, self.cache_tokens // (longest + self.params.max_tokens)) or 1
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        rows = [_Row(request, number, self.params, self.stopping) for request, number in batch]
        device = self.model.device
        numbers = [(r.request.prompt_index, r.number, r.request.position) for r in rows]
        prompt_indices, samples, positions = torch.tensor(numbers, device=device).T

        def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
            """Draw each token with its row's noise, and leave `generate` no other choice."""
            position = positions + input_ids.shape[1] - prompts.shape[1]
            noise = uniform(self.seed, prompt_indices, samples, position)
            ids, logprobs = sample(scores, self.params, noise)
            for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
                row.append(token, logprob)
            return torch.full_like(scores, -torch.inf).scatter(1, ids[:, None], 0.0)

        def all_over(input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
            return torch.full((len(rows),), all(row.over for row in rows), device=device)

        prompts, mask = pad_rows([r.request.tokens for r in rows], self.pad_token_id, left=True)
        with _plainly(self.model), torch.no_grad():
            self.model.generate(
                input_ids=prompts.to(device),
                attention_mask=mask.long().to(device),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([all_over]),
                max_new_tokens=max(row.limit for row in rows),
                do_sample=False,
            )
        return [row.finished() for row in rows]


class _Row:
    """One sample being drawn; what is drawn after its end is dropped."""

    def __init__(
        self, request: Request, number: int, params: SamplingParams, stopping: Stopping
    ) -> None:
        self.request, self.number, self.stopping = request, number, stopping
        self.limit = request.limit(params)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False

    @property
    def over(self) -> bool:
        return self.stopped or len(self.tokens) >= self.limit

    def append(self, token: int, logprob: float) -> None:
        if not self.over:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.stopped = self.stopping.ends(self.tokens)

    def finished(self) -> Finished:
        completion = Completion(self.tokens, self.logprobs, "stop" if self.stopped else "length")
        return Finished(self.request, self.number, completion)


@contextmanager
def _plainly(model: PreTrainedModel) -> Iterator[None]:
    """Ignore what the model's own generation config asks for, such as penalties or another end."""
    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)  # padding only follows an end
    try:
        yield
    finally:
        model.generation_config = own
