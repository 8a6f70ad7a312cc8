"""The record of a step, from which it can be inspected, compared and replayed.

Shapes: B rows on this rank, T completion width.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.batch import Batch
from rlhf_pg.data.row_files import StepTokens, records_of
from rlhf_pg.data.rows import sample_numbers
from rlhf_pg.report.run_files import StepRecord, line_of
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.runtime import Runtime


@dataclass(frozen=True)
class Recorder:
    """Records steps with scores of the sources `names`; all methods are collective."""

    runtime: Runtime
    tokenizer: PreTrainedTokenizerBase
    names: Sequence[str]
    parameters: Callable[[], Mapping[str, Tensor]]

    def fingerprints(self, trained: bool = False) -> dict[str, str]:
        """Hash the models' tensors by name; a sharded one has the sum of its shards' hashes."""
        hashes = {}
        for name, parameter in self.parameters().items():
            if parameter.requires_grad or not trained:
                hashes[name] = _hash(parameter)
        numbers = torch.tensor([*hashes.values()], dtype=torch.int64)
        if self.runtime.splits:
            numbers = self.runtime.all_reduce_sum(numbers.to(self.runtime.device))
        texts = [f"{number % 2**64:016x}" for number in numbers.tolist()]
        return dict(zip(hashes, texts, strict=True))

    def record(self, step: int, batch: Batch, shown: int | None) -> StepRecord:
        """Record a step.

        `shown` is the number of prompts whose first completion the console shows; None for a step
        that is not logged, whose record has neither texts nor completions.
        """
        trace = {
            "step": step,
            "num_prompts": batch.num_prompts,
            "other_tokens": batch.other_tokens,
            "sources": list(self.names),
        }
        is_logged = shown is not None
        tokens = self._tokens(batch, _numbers(batch, is_logged), is_logged)
        greedy = None
        if batch.greedy is not None:
            numbers = {"sampler_logprob": batch.greedy.sampler_logprobs}
            greedy = self._tokens(batch.greedy, numbers)
        record = StepRecord(trace=trace, tokens=tokens, greedy=greedy)
        if not is_logged:
            return record
        lines = ",".join(map(line_of, self._completions(batch)))
        completions: list[dict[str, Any]] = []
        for text in self.runtime.gather_objects(f"[{lines}]"):
            if self.runtime.is_main:
                completions += json.loads(text)
        completions.sort(key=lambda completion: completion["prompt_index"])
        firsts = []
        failed = []
        for row, completion in enumerate(completions):
            if completion["sample"] == 0:
                firsts.append(row)
            if completion.get("error") is not None:
                failed.append(row)
        rows = sorted({*firsts[:shown], *failed[:shown]})
        return replace(record, completions=completions, shown=rows)

    def _completions(self, batch: Batch) -> list[dict[str, Any]]:
        """Return a readable record of each completion, with its total scores."""
        total = sum_step_scores(batch.scores).tolist()
        groups = batch.groups.tolist()
        truncated = batch.truncated.tolist()
        mask = batch.action_mask
        sums = torch.where(mask, batch.advantages.detach(), 0.0).double().sum(1)
        means = (sums / mask.sum(1)).tolist()
        records = []
        samples = sample_numbers(groups)
        for i, row in enumerate(batch.rows):
            record: dict[str, Any] = {
                "prompt_index": groups[i],
                "sample": samples[i],
                "prompt": row.prompt,
                "completion": row.completion,
                **{f"rewards/{name}": total[i][k] for k, name in enumerate(self.names)},
                "advantage": None,
                "truncated": truncated[i],
            }
            if not math.isnan(means[i]):
                record["advantage"] = float(f"{means[i]:.6g}")
            record |= row.logged
            if row.episode is not None:
                record |= {"turns": row.episode.turns, "error": row.episode.error}
            records.append(record)
        return records

    def _tokens(
        self,
        batch: Batch,
        numbers: Mapping[str, Tensor],
        with_texts: bool = False,
    ) -> StepTokens | None:
        """Gather completions with numbers (B,T); None on all processes but the main one."""
        runtime = self.runtime
        records, blank = records_of(batch, numbers, batch.dataset_rows, runtime.rank)
        parts = runtime.gather_objects(records)
        if not runtime.is_main:
            return None
        everyone = [record for part in parts for record in part]
        everyone.sort(key=itemgetter("prompt_index"))
        texts_of = partial(token_texts, self.tokenizer) if with_texts else None
        return StepTokens.of(everyone, blank, texts_of)


def _numbers(batch: Batch, logged: bool) -> dict[str, Tensor]:
    """Return numbers per token (B,T) by name; logged steps add those of the token view."""
    policy = batch.sampler_logprobs
    numbers: dict[str, Any] = {
        "advantage": batch.advantages,
        "sampler_logprob": policy,
    }
    if batch.branches is not None:
        numbers["line"] = batch.branches.double()
    if logged:
        numbers["reward"] = batch.rewards
        numbers["value"] = batch.values
        if batch.old_logprobs is not None:
            policy = batch.old_logprobs
            numbers["log_ratio"] = policy - batch.sampler_logprobs
        if batch.ref_logprobs is not None:
            numbers["kl"] = policy - batch.ref_logprobs
        if batch.teacher_logprobs is not None:
            numbers["teacher"] = batch.teacher_logprobs - policy
    return {name: column for name, column in numbers.items() if column is not None}


def _hash(tensor: Tensor) -> int:
    """Hash this process's part of a tensor, as an int64."""
    local = getattr(tensor, "ds_tensor", tensor)
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
    content = local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return int.from_bytes(
        hashlib.blake2b(content, digest_size=8).digest(),
        "little",
        signed=True,
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return a text for each token; together they are the decoded ids.

    Special tokens are shown. A token that ends within a character has an empty text; the character
    is with the token that completes it. Invalid bytes are shown as U+FFFD; with some tokenizers
    these differ from those of decoding all ids at once.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([token]) for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    silent: list[int] = []  # tokens that wait for the rest of their character
    for token in ids:
        silent.append(token)
        try:
            text = stream.step(fast, token)
        except Exception:  # invalid bytes have changed the text before them
            text = fast.decode(silent, skip_special_tokens=False)
            stream = DecodeStream(skip_special_tokens=False)
        texts.append(text or "")
        if text:
            silent = []
    if silent:
        texts[-1] = fast.decode(silent, skip_special_tokens=False)
    return texts
