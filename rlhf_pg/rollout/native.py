"""The engine that samples in this process, on the policy's own weights."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.masking import widen
from rlhf_pg.models import max_positions
from rlhf_pg.rollout.engine import Completion, SamplingParams
from rlhf_pg.rollout.sampling import sample, uniform


class NativeEngine:
    """Generates with a `transformers` decoder: each prompt is prefilled once for all its samples,
    and a row that has finished leaves the batch.

    Args:
        model: a causal language model; its weights are used where they are.
        eos_token_ids: one id or several; each ends a row.
        pad_token_id: fills the left of shorter prompts (never attended to).
        tokenizer: only needed for `SamplingParams.stop`.

    Raises:
        ValueError: the model has layers whose state cannot be shared among samples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: int | Iterable[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        for layer in DynamicCache(config=model.config).layers:
            if not hasattr(layer, "batch_repeat_interleave"):
                raise ValueError(
                    f"the native engine cannot share a prompt among samples in a model with "
                    f"recurrent layers ({type(layer).__name__})"
                )
        self.model = model
        self.eos_token_ids = (
            [eos_token_ids] if isinstance(eos_token_ids, int) else sorted(set(eos_token_ids))
        )
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample `n` completions per prompt, in the order prompt * n + sample (`RolloutEngine`).

        Raises:
            ValueError: n below 1, an empty prompt, a prompt that leaves no room for `max_tokens`,
                `stop` without a tokenizer, or not one prompt id per prompt.
            FloatingPointError: the model's logits are NaN.
        """
        self._check(prompts, n, params)
        if not prompts:
            return []
        draws = torch.tensor(list(range(len(prompts)) if prompt_ids is None else prompt_ids))
        if len(draws) != len(prompts):
            raise ValueError(f"prompt_ids has {len(draws)} entries for {len(prompts)} prompts")
        device = self.model.device
        rows = _Rows(
            draws=draws.repeat_interleave(n).to(device),
            samples=torch.arange(n).repeat(len(prompts)).to(device),
        )
        with _evaluating(self.model):
            self._decode(_Batch(self.model, prompts, n, self.pad_token_id), rows, params, seed)
        return rows.completions()

    def _decode(self, batch: "_Batch", rows: "_Rows", params: SamplingParams, seed: int) -> None:
        eos = torch.tensor(self.eos_token_ids, device=self.model.device)
        live = torch.arange(len(rows.draws), device=self.model.device)
        for position in range(params.max_tokens):
            noise = uniform(seed, rows.draws[live], rows.samples[live], position)
            ids, logprobs = sample(batch.logits, params, noise)
            rows.append(live, ids, logprobs)
            stopped = torch.isin(ids, eos)
            if params.stop_strings:
                stopped |= self._hits_stop_string(rows, live, params.stop_strings)
            rows.stopped[live] = stopped
            going = (~stopped).nonzero().squeeze(1)
            if not len(going) or position + 1 == params.max_tokens:
                return
            live, ids = live[going], ids[going]
            if len(going) < len(stopped):
                batch.keep(going)
            batch.step(ids)

    def _hits_stop_string(self, rows: "_Rows", live: Tensor, stop: tuple[str, ...]) -> Tensor:
        assert self.tokenizer is not None
        tokens = torch.stack(rows.tokens, dim=1)[live].tolist()
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=False)
        return torch.tensor([any(s in text for s in stop) for text in texts], device=live.device)

    def _check(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings are matched on text: give NativeEngine a tokenizer")
        limit = max_positions(self.model)
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(
                    f"prompt {i} is empty: a model needs at least one token to continue"
                )
            if limit and len(prompt) + params.max_tokens > limit:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; with max_tokens {params.max_tokens} "
                    f"that exceeds the model's max_position_embeddings of {limit}"
                )


@dataclass
class _Rows:
    """What has been sampled so far, R = prompts * n rows; a finished row is no longer `live`."""

    draws: Tensor  # (R,)
    samples: Tensor  # (R,)
    tokens: list[Tensor] = field(default_factory=list)  # per position (R,)
    logprobs: list[Tensor] = field(default_factory=list)  # per position (R,)

    def __post_init__(self) -> None:
        self.lengths = torch.zeros_like(self.draws)
        self.stopped = torch.zeros_like(self.draws, dtype=torch.bool)

    def append(self, live: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        self.tokens.append(torch.zeros_like(self.draws).index_copy(0, live, ids))
        column = logprobs.new_zeros(len(self.draws))
        self.logprobs.append(column.index_copy(0, live, logprobs))
        self.lengths[live] += 1

    def completions(self) -> list[Completion]:
        tokens = torch.stack(self.tokens, dim=1).tolist()
        all_logprobs = torch.stack(self.logprobs, dim=1)
        if all_logprobs.isnan().any():
            raise FloatingPointError("the model's logits are NaN: its weights have diverged")
        logprobs = all_logprobs.tolist()
        ends = zip(self.lengths.tolist(), self.stopped.tolist(), strict=True)
        return [
            Completion(tokens[i][:length], logprobs[i][:length], "stop" if stopped else "length")
            for i, (length, stopped) in enumerate(ends)
        ]


class _Batch:
    """The rows being decoded: their keys and values, mask, positions and next-token logits."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], n: int, pad_token_id: int
    ) -> None:
        self.model = model
        self.logits: Tensor
        self.cache: Any = DynamicCache(config=model.config)
        width = max(len(prompt) for prompt in prompts)
        padded = [[pad_token_id] * (width - len(p)) + list(p) for p in prompts]
        lengths = torch.tensor([len(p) for p in prompts], device=model.device)
        columns = torch.arange(width, device=model.device)
        self.mask = (columns >= width - lengths[:, None]).long()
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self._forward(torch.tensor(padded, device=model.device), positions)
        self.cache.batch_repeat_interleave(n)
        self.mask = self.mask.repeat_interleave(n, dim=0)
        self.positions = lengths.repeat_interleave(n)
        self.logits = self.logits.repeat_interleave(n, dim=0)

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def step(self, ids: Tensor) -> None:
        """Feed each row's newest token, (R,)."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        self._forward(ids[:, None], self.positions[:, None])
        self.positions = self.positions + 1

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = widen(output.logits[:, -1])


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
