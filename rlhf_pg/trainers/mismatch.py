"""How far the sampler's log-probabilities are from the policy's, and what is done about it."""

import math

from torch import Tensor

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.experience import Experience
from rlhf_pg.losses import sampler_weights


def against_sampler(
    args: PolicyGradientConfig, batch: Experience
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The weights (B,T) of `sampler_correction`, if there is one, and (B,T) numbers for the log.

    These are the weights, or without a correction the plain ratios; and the differences.
    """
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs, batch.sampler_logprobs
    mode, weights = args.correction, None
    if mode == "none":
        ratios = sampler_weights(*logprobs, batch.action_mask, "token_truncate", math.inf)
    else:
        bounds = args.sampler_clip_max, args.sampler_clip_min
        weights = ratios = sampler_weights(*logprobs, batch.action_mask, mode, *bounds)
    difference = (logprobs[0] - logprobs[1]).abs()
    numbers = {f"sampling/importance_sampling_ratio/{x}": ratios for x in ("min", "mean", "max")}
    numbers |= {f"sampling/sampling_logp_difference/{x}": difference for x in ("mean", "max")}
    return weights, numbers
