"""The choice of the rollout engine for `rollout_engine: auto`, the same on all processes."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.rollout import RolloutEngine
from rlhf_pg.rollout.factory import installed, new_engine, unsuited
from rlhf_pg.rollout.vllm.in_process import lacking
from rlhf_pg.runtime import Runtime
from rlhf_pg.trainers.learner import Learner

C = TypeVar("C", bound=PolicyGradientConfig)
logger = logging.getLogger(__name__)

# What a vLLM that was chosen takes from the config, and a native engine that was chosen does not.
OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length")


def choose_engine(
    args: PolicyGradientConfig, model: PreTrainedModel, runtime: Runtime
) -> tuple[str, str]:
    """Return the name of the engine that samples, and why; collective."""
    if args.rollout_engine != "auto":
        return args.rollout_engine, "as the config says"
    why = unsuited(args, model, runtime.device.type, installed()) or lacking(model)
    why = runtime.first_error(why)
    return ("vllm", "auto: vLLM suits") if why is None else ("native", f"auto: {why}")


def with_engine(args: C, engine: str) -> C:
    """Return the config with the chosen engine; vLLM sleeps, so that updates have its memory."""
    if args.rollout_engine != "auto":
        return args
    if engine == "vllm":
        return dataclasses.replace(args, rollout_engine="vllm", vllm_enable_sleep_mode=True)
    defaults = {f.name: f.default for f in dataclasses.fields(args) if f.name in OF_VLLM}
    return dataclasses.replace(args, rollout_engine="native", **defaults)  # type: ignore[arg-type]


def make_engine(
    args: PolicyGradientConfig,
    learner: Learner,
    stop_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    longest_row: int,
    name: str,
) -> RolloutEngine:
    """Make the engine of this name for the learner's policy."""
    policy, is_main = learner.full_policy.module, learner.runtime.is_main
    chosen = with_engine(args, name)
    return new_engine(chosen, policy, stop_token_ids, tokenizer, is_main, longest_row)


def start_engine(
    args: PolicyGradientConfig,
    name: str,
    why: str,
    runtime: Runtime,
    make: Callable[[str], RolloutEngine],
) -> tuple[RolloutEngine, str, str]:
    """Start the chosen engine; return it with its name and why it is this one. Collective.

    A vLLM that `auto` has chosen starts on every process or on none; else the native one samples.
    """
    if args.rollout_engine != "auto" or name != "vllm":
        return make(name), name, why
    failure = None
    try:
        engine = make(name)
    except Exception as error:  # out of memory, a graph that cannot be recorded, ...
        failure = f"{type(error).__name__}: {error}"
    if (failure := runtime.first_error(failure)) is None:
        return engine, name, why
    gc.collect()  # what has begun holds memory
    why = f"vLLM cannot start ({failure})"
    if runtime.is_main:
        logger.warning("rollout_engine auto: %s, so the native engine samples", why)
    return make("native"), "native", f"auto: {why}"
