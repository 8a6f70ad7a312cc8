"""The agreement check: sampler and policy give every token the same log-probability.

With d = log pi_sampler(y) - log pi(y), for tokens y that the sampler drew,

    KL(pi_sampler || pi) = E[exp(-d) - 1 + d],    E[1 - exp(-d)] = 0

The KL is 0 but for rounding. The second mean is 0 for any two distributions: any other value means
that the sampler does not draw from the distribution that it reports, or leaves tokens out. Every
step measures both over all of its tokens before its weights change. This catches training on a
policy other than the one that sampled, whether by the sampler, packing, padding or an adapter.

Shapes: B rows on this rank, T completion width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.policy import Policy, has_experts
from rlhf_pg.runtime import Runtime


class Limits(NamedTuple):
    """The largest differences that rounding explains, in nats."""

    kl: float  # mean over tokens
    usual: float  # a smaller KL is never a jump
    mean: float  # |mean of 1 - exp(-d)| over many tokens
    token: float  # |d| of a single token


# docs/reliability.md has the figures. Softmaxes in float32 lose small terms of large vocabularies.
LIMITS = {
    torch.float64: Limits(1e-8, 1e-8, 1e-6, 1e-3),
    torch.float32: Limits(1e-6, 1e-6, 1e-4, 5e-3),
    torch.bfloat16: Limits(5e-2, 5e-4, 5e-4, 0.5),
}
# Of a sampler in fp8, whose rounding is coarser than that of the policy in any dtype.
FP8 = Limits(0.2, 1e-2, 5e-4, 1.5)
ROUTED = 4  # factor on `Limits.token` with experts: rounding may change the router's choice
JUMP = 20  # a KL this many times that of recent steps is a fault
MEMORY = 0.99  # decay per step of the sums over recent steps
SURE = 5  # allowed standard errors of the mean over recent steps


class DisagreementError(RuntimeError):
    """Sampler and policy have different distributions; ends the run."""


class Agreement:
    """Compares the sampler's log-probabilities with the policy's, step by step.

    Args:
        log_probs: computes the policy's log-probabilities (B,T) of rows; it may be collective.
        refuses: False where the sampler may differ (`truncated_sampling: ignore`, or a
            `sampler_correction` other than auto and none): the difference is only reported.
        samples_in_fp8: the sampler computes in fp8 (`vllm_quantization`).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        runtime: Runtime,
        policy: Policy,
        log_probs: Callable[[Batch], Tensor],
        refuses: bool = True,
        samples_in_fp8: bool = False,
    ) -> None:
        self.limits = LIMITS[dtype]  # of two computations of the policy
        self.sampler_limits = FP8 if samples_in_fp8 else LIMITS[dtype]
        self.runtime = runtime
        self.refuses = refuses
        self.policy = policy
        self.log_probs = log_probs
        if has_experts(policy.model):
            self.limits = self.limits._replace(token=ROUTED * self.limits.token)
            token = ROUTED * self.sampler_limits.token
            self.sampler_limits = self.sampler_limits._replace(token=token)
        self.recent = torch.zeros(4, dtype=torch.float64)  # decayed sums over steps
        self.compared_row = False  # whether a row was computed alone for comparison
        self.inferred: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """Begin a step, whose log-probabilities may have been computed before its updates."""
        self.inferred = None if batch.old_logprobs is None else batch

    def check(self, batch: Batch) -> dict[str, float]:
        """Judge the step before its first update, and return its metrics; collective.

        `batch` has the `old_logprobs` of that update. If `begin` was given some, those are compared
        instead. Otherwise, with dropout nothing is compared: the update's are of another policy.

        Raises:
            DisagreementError: on all processes, sampler and policy differ by more than rounding.
        """
        mask = batch.action_mask
        if self.inferred is not None:
            batch = self.inferred
            mask = batch.action_mask
            self.inferred = None
        elif self.policy.drops:
            mask = torch.zeros_like(mask)
        d = _differences(batch.sampler_logprobs, batch.old_logprobs, mask)
        sums = self.runtime.all_reduce_sum(_sums(d, mask)).cpu()
        largest = torch.cat([d.new_zeros(1), d.abs().flatten()]).amax()
        largest = self.runtime.gather(largest[None])[0].max()
        if sums[0] and sums.isfinite().all():
            fault = self.excess(sums, self.sampler_limits) or self._drift(sums)
            self.recent = MEMORY * self.recent + sums
            if self.refuses and (fault or not self.compared_row):
                self.compared_row = True
                fault = self._explain(fault, batch)
                with self.runtime.raise_together(DisagreementError):  # the steps before are saved
                    if fault is not None:
                        raise DisagreementError(fault)
        count, total, _, kl = sums.tolist()
        return {
            "agreement/kl": kl / count if count else math.nan,
            "agreement/mean": total / count if count else math.nan,
            "agreement/max": largest.item(),
        }

    def excess(self, sums: Tensor, limits: Limits) -> str | None:
        """Describe how sums of a step or a row exceed what rounding explains; else None."""
        count, _, _, kl = sums.tolist()
        usual = self.recent[3] / self.recent[0] if self.recent[0] else math.inf
        most = min(limits.kl, max(limits.usual, JUMP * float(usual)))
        return _beyond("agreement/kl", kl, count, most, 3 * limits.token**2 / 2)

    def _drift(self, sums: Tensor) -> str | None:
        """Describe the bias of 1 - exp(-d) over recent steps; None if chance explains it."""
        count, d, squares, kl = (MEMORY * self.recent + sums).tolist()
        error = (max(squares - d * d / count, 0)) ** 0.5
        return _beyond(
            "mean of 1 - exp(-d)",
            d - kl,
            count,
            self.sampler_limits.mean,
            SURE * error,
        )

    @torch.no_grad()
    def _explain(self, fault: str | None, batch: Batch) -> str | None:
        """Compute the worst or most padded row alone, and name the cause. Collective."""
        if not batch.num_rows:
            batch = batch.blank_row()
        logprobs = batch.old_logprobs
        if fault:
            gaps = (batch.sampler_logprobs - logprobs).abs()
            worst = gaps.where(batch.action_mask, 0.0).amax(1)
        else:
            worst = -batch.prompt_mask.sum(1)
        index = int(worst.argmax())
        row = batch.select(torch.tensor([index]))
        mask = row.action_mask
        width = row.action_mask.shape[1]
        alone = self.log_probs(row)

        def compared(a: Tensor, b: Tensor) -> Tensor:
            return self.runtime.all_reduce_sum(_sums(_differences(a, b, mask), mask)).cpu()

        if self.excess(compared(logprobs[index : index + 1, :width], alone), self.limits):
            how = "packing" if 0 < row.longest <= self.policy.window else "padding"
            return (
                f"the policy's log-probabilities of a row change with the rows beside it in a "
                f"micro-batch ({how}): set micro_batch_tokens to 1, which computes every row alone"
            )
        if fault is None:
            return None
        message = f"the sampler's log-probabilities are not the policy's ({fault}): "
        model = self.policy.model
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                base = self.log_probs(row)
            of_base = compared(row.sampler_logprobs, base)[3]
            of_policy = compared(row.sampler_logprobs, alone)[3]
            if 10 * of_base < of_policy:
                return f"{message}it samples without the adapter; give the engine the adapter"
            message += "its copy of the adapter or the sampler itself differs; "
        else:
            message += "the sampler differs; "
        return message + (
            "check that the engine serves the same model (full context, not quantised) at the "
            "same temperature and receives new weights after every update; choose another "
            "rollout_engine, or set sampler_correction to correct for the difference"
        )


def _differences(sampler: Tensor, policy: Tensor, mask: Tensor) -> Tensor:
    """Return d (B,T) in float64, 0 in masked slots, clamped to 20 nats to keep exp finite."""
    d = sampler.detach().double() - policy.detach().double()
    return torch.where(mask, d, 0.0).clamp(-20, 20)


def _sums(d: Tensor, mask: Tensor) -> Tensor:
    """Return (4,): the number of tokens, and the sums of d, d^2 and exp(-d) - 1 + d."""
    return torch.stack(
        [
            mask.sum().double(),
            d.sum(),
            (d * d).sum(),
            (torch.expm1(-d) + d).sum(),
        ]
    )


def _beyond(
    name: str,
    total: float,
    count: float,
    limit: float,
    allowed: float,
) -> str | None:
    """Describe a sum over tokens beyond `count * limit + allowed`; None if it is within."""
    if abs(total) <= count * limit + allowed:
        return None
    return f"{name} {total / count:.3g} over {count:.0f} tokens, limit {limit:.3g}"
