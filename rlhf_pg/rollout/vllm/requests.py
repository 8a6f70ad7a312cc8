"""Requests to vLLM, shared by both engines."""

import re
from collections.abc import Sequence
from typing import Any

from rlhf_pg.boundary.quoted import quote
from rlhf_pg.rollout.engine import SamplingParams

OLDEST = (0, 28)
TOO_NEW = (0, 34)
LEAST_TEMPERATURE = 0.01  # vLLM silently raises a temperature between 0 and this to it
# The limit beyond which vLLM would truncate.
LONGEST = "the longest sequence (vllm_max_model_length, or --max-model-len of a server)"


def check_version(version: str, what: str) -> tuple[int, ...]:
    """Return major and minor of a vLLM version; ValueError outside the tested range."""
    oldest, too_new = (".".join(map(str, v)) for v in (OLDEST, TOO_NEW))
    number = tuple(map(int, re.findall(r"\d{1,9}", version[:99])[:2]))
    if not OLDEST <= number < TOO_NEW:
        raise ValueError(f'{what} is version {quote(version)}: use "vllm>={oldest},<{too_new}"')
    return number


def options(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Translate the sampling parameters for vLLM; none is left to the model's defaults.

    ValueError if vLLM would change the temperature.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 or at least {LEAST_TEMPERATURE} with vLLM, which would raise "
            f"it to that, got {params.temperature}"
        )
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "stop": list(params.stop_strings),
        # The model's own EOS may be one of our stop tokens, or none.
        "ignore_eos": True,
        "stop_token_ids": list(eos_token_ids),
        "skip_special_tokens": False,  # a stop string may contain them
        "logprobs": 0,  # of the sampled token only
    }
