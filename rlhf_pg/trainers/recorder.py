"""Records of steps, for whoever wants to look at one, compare it or make it again.

Shapes: B rows on this rank, N on all ranks, T completion width, M tokens of all completions.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.records import Experience, Rollout, sample_numbers
from rlhf_pg.data.token_texts import token_texts
from rlhf_pg.report.json_lines import line_of
from rlhf_pg.report.run_files import Start, StepTokens, Trace
from rlhf_pg.report.versions import versions
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.runtime import Runtime, digests
from rlhf_pg.trainers.samples import ScoredBatch
from rlhf_pg.trainers.token_log import TokenLog


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A record of what a step did; complete on the main process alone.

    Attributes:
        trace: of all completions.
        outside: lines for outside.jsonl: what was asked of others, and what they said.
        completions: for completions.jsonl, without the step; none where they are not due.
        tokens: of these completions.
        shown: which of them the console shows.
    """

    trace: Trace
    outside: Sequence[Mapping[str, Any]] = ()
    completions: Sequence[Mapping[str, Any]] = ()
    tokens: StepTokens | None = None
    shown: Sequence[int] = ()


@dataclass
class Recorder:
    """A recorder of steps, all of whose methods are collective.

    Attributes:
        names: of the sources of reward.
        parameters: of the models, by name.
        log: watches the update of a step whose tokens are recorded.
        paid: (B,T) what each token of the step is paid.
        step, weights: the step recorded last, and the fingerprints of what it has trained.
        altered: those that have changed since, although no step was taken.
    """

    runtime: Runtime
    tokenizer: PreTrainedTokenizerBase
    names: Sequence[str]
    parameters: Callable[[], Mapping[str, Tensor]]
    log: TokenLog | None = None
    paid: Tensor | None = None
    step: int = -1
    weights: dict[str, str] = field(default_factory=dict)
    altered: dict[str, str] = field(default_factory=dict)

    def start(self, step: int, data: str | None, rewards: Mapping[str, str | None]) -> Start:
        """Record on what the run begins or goes on, and from which weights."""
        runtime = self.runtime
        weights = self._digests(self._ordered())
        self.step, self.weights = step, {name: weights[name] for name in self._trained()}
        return Start(
            step=step,
            versions=versions(),
            processes=runtime.world,
            backend=runtime.kind,
            device=runtime.device_name,
            data=data,
            rewards=rewards,
            weights=weights,
        )

    def begin(self, step: int) -> None:
        """Look, before a step, whether the weights are as the step before has left them."""
        now = self._digests(self._trained())
        last = self.weights if self.step == step - 1 else now
        self.altered = {name: number for name, number in now.items() if last[name] != number}

    def watch(self, experience: Experience) -> TokenLog:
        """Watch the update that follows, of a step whose tokens are recorded; not collective."""
        self.log = TokenLog(experience)
        return self.log

    def record(
        self,
        step: int,
        batch: ScoredBatch,
        experience: Experience,
        outside: Sequence[Mapping[str, Any]],
        shown: int | None,
    ) -> StepRecord:
        """Record a step that was taken.

        Args:
            outside: what this process asked of others.
            shown: prompts whose first completion the console shows; None: neither completions nor
                tokens are recorded.
        """
        trace = self._trace(step, batch, experience)
        asked = [{"step": step} | line for line in self._gathered(outside)]
        if shown is None:
            return StepRecord(trace=trace, outside=asked)
        own = batch.samples.records(batch.scores, self.names, _means(experience))
        completions = sorted(self._gathered(own), key=lambda said: said["prompt_index"])
        return StepRecord(
            trace=trace,
            outside=asked,
            completions=completions,
            tokens=self._tokens(batch.rollout, experience),
            shown=_shown(completions, shown),
        )

    def _gathered(self, own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the records of all processes, as JSON has them; none but on the main process."""
        texts = self.runtime.gather_text(f"[{','.join(map(line_of, own))}]")
        if not self.runtime.is_main:
            return []
        return [said for text in texts for said in json.loads(text)]

    # ------------------------------------------------------------------------------------- trace

    def _trace(self, step: int, batch: ScoredBatch, experience: Experience) -> Trace:
        rollout, samples = batch.rollout, batch.samples
        there = experience.action_mask
        columns = {
            "prompt_index": rollout.groups,
            "rows": torch.tensor(samples.rows, dtype=torch.int64),
            "prompts": _checksums(rollout.prompt_ids, rollout.prompt_mask),
            "ids": _checksums(rollout.completion_ids, rollout.completion_mask),
            "logprobs": _sums(rollout.sampler_logprobs, rollout.action_mask),
            "advantages": _sums(experience.advantages, there),
        }
        if experience.values is not None:
            columns["values"] = _sums(experience.values, there)
        device = rollout.groups.device
        own = torch.stack([column.to(device).double() for column in columns.values()], dim=1)
        scores = sum_step_scores(batch.scores).double()
        everyone, _ = self.runtime.gather(torch.cat([own, scores], dim=1))
        everyone = everyone[everyone[:, 0].argsort(stable=True)].cpu()
        found = dict(zip(columns, everyone.T, strict=False))
        first = [i for i, n in enumerate(sample_numbers(everyone[:, 0].tolist())) if n == 0]
        self.weights, self.step = self._digests(self._trained()), step
        return Trace(
            step=step,
            prompt_index=found["prompt_index"][first].long().tolist(),
            rows=found["rows"][first].long().tolist(),
            prompts=[f"{int(crc):08x}" for crc in found["prompts"]],
            ids=[f"{int(crc):08x}" for crc in found["ids"]],
            logprobs=_listed(found["logprobs"]),
            rewards={
                name: _listed(column)
                for name, column in zip(self.names, everyone.T[len(columns) :], strict=True)
            },
            advantages=_listed(found["advantages"]),
            values=_listed(found["values"]) if "values" in found else None,
            weights=list(self.weights.values()),
            altered=self.altered,
        )

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def _ordered(self) -> dict[str, Tensor]:
        """Return all parameters, those that are trained first."""
        return self._trained() | dict(self.parameters())

    def _digests(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return fingerprints by name; of shards the sum over all processes."""
        numbers = digests.digests(tensors.values()).to(self.runtime.device)
        if self.runtime.splits:
            numbers = self.runtime.all_reduce_sum(numbers)
        return dict(zip(tensors, map(digests.shown, numbers.tolist()), strict=True))

    # ------------------------------------------------------------------------------------ tokens

    def _tokens(self, rollout: Rollout, experience: Experience) -> StepTokens | None:
        """Return the tokens of all completions; None on all processes but the main one."""
        mask, numbers = rollout.completion_mask, self._numbers(rollout, experience)
        columns = [rollout.completion_ids, rollout.action_mask, *numbers.values()]
        flat = torch.stack([column.double()[mask] for column in columns], dim=1)
        tokens = self.runtime.gather(flat)[0].cpu().numpy()
        own = torch.stack([rollout.groups, mask.sum(1)], dim=1)
        rows = self.runtime.gather(own)[0].cpu().numpy()
        if not self.runtime.is_main:
            return None
        order = rows[:, 0].argsort(kind="stable")
        starts = np.concatenate([[0], rows[:, 1].cumsum()])
        parts = [tokens[starts[i] : starts[i + 1]] for i in order]
        tokens, rows = np.concatenate([tokens[:0], *parts]), rows[order]
        ids = [part[:, 0].astype(int).tolist() for part in parts]
        return StepTokens(
            prompt_index=rows[:, 0],
            sample=np.array(sample_numbers(rows[:, 0].tolist()), np.int32),
            lengths=rows[:, 1].astype(np.int32),
            ids=tokens[:, 0].astype(np.int32),
            action=tokens[:, 1].astype(np.bool_),
            texts=[text for row in ids for text in token_texts(self.tokenizer, row)],
            numbers={name: tokens[:, 2 + i] for i, name in enumerate(numbers)},
        )

    def _numbers(self, rollout: Rollout, experience: Experience) -> dict[str, Tensor]:
        """Return the numbers (B,T) of a token by name, NaN where the policy did not choose it."""
        assert self.log is not None
        now, sampled = self.log.logprobs, rollout.sampler_logprobs
        numbers = {"advantage": experience.advantages, "log_ratio": now - sampled}
        if self.paid is not None:
            numbers["reward"] = self.paid
        if experience.ref_logprobs is not None:
            before = now if experience.old_logprobs is None else experience.old_logprobs
            numbers["kl"] = before - experience.ref_logprobs
        numbers["entropy"] = self.log.entropy
        if experience.values is not None:
            numbers["value"] = experience.values
        numbers["sampler_logprob"] = sampled
        mask = rollout.action_mask
        return {name: x.detach().masked_fill(~mask, math.nan) for name, x in numbers.items()}


def _sums(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.detach(), 0.0).double().sum(1)


def _means(experience: Experience) -> list[float | None]:
    """Return the mean advantage of each row, with six digits; None for a row without tokens."""
    mask = experience.action_mask
    means = _sums(experience.advantages, mask) / mask.sum(1)  # 0/0 is NaN
    return [None if mean != mean else float(f"{mean:.6g}") for mean in means.tolist()]


def _checksums(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the CRC-32 of the real ids of each row, (B,) int64 on the CPU."""
    rows = zip(ids.cpu().numpy().astype("<i4"), mask.cpu().numpy(), strict=True)
    return torch.tensor([zlib.crc32(row[real].tobytes()) for row, real in rows], dtype=torch.int64)


def _listed(column: Tensor) -> list[float | None]:
    return [x if math.isfinite(x) else None for x in column.tolist()]


def _shown(completions: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Choose the first completions of `count` prompts, and the first `count` failed episodes."""
    firsts = [i for i, said in enumerate(completions) if said["sample"] == 0]
    failed = [i for i, said in enumerate(completions) if said.get("error") is not None]
    return sorted({*firsts[:count], *failed[:count]})
