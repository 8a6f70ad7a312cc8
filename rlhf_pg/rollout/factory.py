"""Make the rollout engine, chosen for `rollout_engine: auto`."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.method import AWAKE
from rlhf_pg.models.adapters import Gather
from rlhf_pg.rollout.engine import RolloutEngine
from rlhf_pg.rollout.native.engine import NativeEngine
from rlhf_pg.runtime import Runtime

C = TypeVar("C", bound=PolicyGradientConfig)
logger = logging.getLogger(__name__)

SLOWEST_START = 180.0  # seconds by which the vLLM of other processes may start later

# Keys that only vLLM uses: reset to their defaults where auto chooses the native engine.
OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length")


def reason_against(args: PolicyGradientConfig, model: PreTrainedModel, kind: str) -> str | None:
    """Return the reason why vLLM does not suit this run on this kind of device, or None."""
    if kind != "cuda":
        return f"the device is {kind}"
    from rlhf_pg.rollout.vllm.in_process import unfit
    from rlhf_pg.rollout.vllm.requests import LEAST_TEMPERATURE, check_version

    try:
        check_version(version("vllm"), "the installed vLLM")  # without the slow import
    except PackageNotFoundError:
        return 'vLLM is not installed (pip install "rlhf-pg[vllm]")'
    except ValueError as error:
        return str(error)
    is_cold = args.temperature < LEAST_TEMPERATURE
    reasons = {
        "vLLM has no float64": args.dtype == "float64",
        "rollout_cache_tokens is set": args.rollout_cache_tokens is not None,
        "rollout_workers is set": bool(args.rollout_workers),
        f"vLLM would raise the temperature to {LEAST_TEMPERATURE}": is_cold,
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or unfit(model)


def choose_engine(
    args: PolicyGradientConfig, model: PreTrainedModel, runtime: Runtime
) -> tuple[str, str]:
    """Return the name of the rollout engine, and the reason; collective."""
    if args.rollout_engine != "auto":
        return args.rollout_engine, "as the config says"
    why = runtime.first_error(reason_against(args, model, runtime.device.type))
    if why is None:
        return ("vllm", "auto: vLLM suits")
    return ("native", f"auto: {why}")


def with_engine(args: C, engine: str) -> C:
    """Return the config with the chosen engine; vLLM sleeps to leave its memory to updates."""
    if args.rollout_engine != "auto":
        return args
    if engine == "vllm":
        return dataclasses.replace(args, rollout_engine="vllm", vllm_enable_sleep_mode=True)
    defaults = {f.name: f.default for f in dataclasses.fields(args) if f.name in OF_VLLM}
    return dataclasses.replace(args, rollout_engine="native", **defaults)  # type: ignore[arg-type]


def start_engine(
    args: PolicyGradientConfig,
    name: str,
    why: str,
    runtime: Runtime,
    make: Callable[[str], RolloutEngine],
) -> tuple[RolloutEngine, str, str]:
    """Start the chosen engine; return it with its name and the reason. Collective.

    If it fails to start on any process, all end; or if `auto` has chosen vLLM, all use the native
    engine.
    """
    can_fall_back = args.rollout_engine == "auto" and name == "vllm"
    watch = runtime.watch
    starting = nullcontext() if watch is None else watch.waiting("the start of the engine")
    hurried: AbstractContextManager[None] = nullcontext()
    engine = failure = None
    try:
        with starting:
            engine = make(name)
    except Exception as error:  # out of memory, a graph that cannot be recorded, ...
        if not can_fall_back:
            if watch is not None:  # others may wait for this process in the engine's start
                watch.tell(error)
            raise
        failure = f"{type(error).__name__}: {error}"
        if watch is not None:
            hurried = watch.hurried(f"vLLM did not start: {failure}", SLOWEST_START)
    if can_fall_back:
        with hurried:
            failure = runtime.first_error(failure)
    if engine is not None and failure is None:
        return engine, name, why
    engine = None
    gc.collect()  # the engine holds memory, and so does the failed one
    why = f"vLLM cannot start ({failure})"
    if runtime.is_main:
        logger.warning("rollout_engine auto: %s, so the native engine samples", why)
    return make("native"), "native", f"auto: {why}"


def new_engine(
    args: PolicyGradientConfig,
    model: PreTrainedModel,
    eos_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    is_main: bool,
    longest: int = 1,
    save: Callable[[Path | None], None] | None = None,
    gathered: Gather | None = None,
    share: float = AWAKE,
) -> RolloutEngine:
    """Create the engine that `args.rollout_engine` names, which is not auto.

    Args:
        model: the policy; its weights are read only when sampling begins.
        is_main: whether this process sends weights to a server.
        longest: tokens of the longest prompt with its completion.
        save: saves the weights for a server, if they are never whole; see `VllmServerEngine`.
        gathered: fills in some weights, if they are sharded; see `VllmEngine`.
        share: of the GPU's memory, for a vLLM in this process.

    ValueError if the engine is not available or cannot sample from the model, RolloutError if the
    server does not answer.
    """
    if args.rollout_engine == "vllm":
        from rlhf_pg.rollout.vllm.in_process import VllmEngine

        return VllmEngine(
            model,
            eos_token_ids,
            tokenizer,
            max_model_length=args.vllm_max_model_length,
            memory=share,
            sleeps=args.vllm_enable_sleep_mode,
            seed=args.seed,
            longest=longest,
            gathered=gathered,
            quantization=args.vllm_quantization,
        )
    if args.rollout_engine == "vllm_server":
        from rlhf_pg.rollout.vllm.server import VllmServerEngine

        directory = args.vllm_sync_directory or Path(args.output_dir) / "sync"
        return VllmServerEngine(
            model,
            eos_token_ids,
            args.vllm_server_base_url,
            Path(directory),
            timeout=args.vllm_server_timeout,
            is_main=is_main,
            save=save,
            quantization=args.vllm_quantization,
        )
    if model.device.type == "cuda" and is_main:
        logger.warning("the native engine has no GPU kernels of its own; vLLM is faster")
    common = model, eos_token_ids, tokenizer.pad_token_id, tokenizer
    if args.rollout_workers:
        from rlhf_pg.rollout.native.workers import WorkerEngine

        return WorkerEngine(*common, args.rollout_workers, args.rollout_cache_tokens)
    return NativeEngine(*common, args.rollout_cache_tokens)
