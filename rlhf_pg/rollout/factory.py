"""Make the rollout engine, chosen for `rollout_engine: auto`, and the runner of episodes."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg import models
from rlhf_pg.boundary import user_modules
from rlhf_pg.config import PolicyGradientConfig, rules
from rlhf_pg.rollout.engine import RolloutEngine
from rlhf_pg.rollout.multi_turn.episodes import EpisodeRunner
from rlhf_pg.rollout.multi_turn.tools import EnvironmentSource, Tool, Toolbox, ToolEnvironment
from rlhf_pg.rollout.native.engine import NativeEngine
from rlhf_pg.runtime import Runtime

C = TypeVar("C", bound=PolicyGradientConfig)
logger = logging.getLogger(__name__)

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

    If `auto` has chosen vLLM and it does not start on all processes, all use the native engine.
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
    gc.collect()  # the failed engine holds memory
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
) -> RolloutEngine:
    """Create the engine that `args.rollout_engine` names, which is not auto.

    Args:
        model: the policy; its weights are read only when sampling begins.
        is_main: whether this process sends weights to a server.
        longest: tokens of the longest prompt with its completion.
        save: saves the weights for a server, if they are never whole; see `VllmServerEngine`.

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
            memory=args.vllm_gpu_memory_utilization,
            sleeps=args.vllm_enable_sleep_mode,
            seed=args.seed,
            longest=longest,
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
        )
    if model.device.type == "cuda" and is_main:
        logger.warning("the native engine has no GPU kernels of its own; vLLM is faster")
    common = model, eos_token_ids, tokenizer.pad_token_id, tokenizer
    if args.rollout_workers:
        from rlhf_pg.rollout.native.workers import WorkerEngine

        return WorkerEngine(*common, args.rollout_workers, args.rollout_cache_tokens)
    return NativeEngine(*common, args.rollout_cache_tokens)


def load_tools(args: PolicyGradientConfig) -> tuple[list[Any] | None, Any]:
    """Return the tools and the environment's factory that the config names, or None."""
    tools = [user_modules.load(name) for name in args.tools] or None
    if not args.environment_factory:
        return tools, None
    return tools, user_modules.load(args.environment_factory, user_modules.FACTORY)


def new_episode_runner(
    args: PolicyGradientConfig,
    tools: Sequence[Tool] | None,
    environments: EnvironmentSource | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    program: Any = None,
    judged: bool = True,
) -> EpisodeRunner | None:
    """Create the runner of episodes, for a run with tools, an environment or an agent's program;
    ValueError if these do not fit together, or if a run without episodes sets keys of episodes.
    """
    has_turns = bool(tools) or environments is not None
    has_agent = program is not None
    arguments = {"tools": tools, "environment_factory": environments, "agent_program": program}
    rules.refuse(
        rules.of_needs(args, [name for name, value in arguments.items() if value not in (None, ())])
    )
    if (has_turns or has_agent) and args.sampler_correction not in ("auto", "none"):
        logger.warning(
            "sampler_correction trains on the sampler's log-probabilities, whose last bits depend "
            "on which episodes are sampled together, so this run is repeated and resumed up to "
            "rounding, not bit for bit"
        )
    shared: dict[str, Any] = {
        "tokenizer": tokenizer,
        "stop_token_ids": models.stop_token_ids(model, tokenizer),
        "max_turns": args.max_turns,
        "skip_special_tokens": args.skip_special_tokens,
    }
    if has_agent:
        if has_turns:
            raise ValueError("agent_program brings its own tools: leave out tools and environments")
        try:
            from rlhf_pg.rollout.agents.runner import AgentRunner, program_of
        except ImportError as error:
            raise ValueError('agent_program needs pip install "rlhf-pg[agents]"') from error
        return AgentRunner(
            program=program_of(program),
            timeout=args.agent_timeout,
            call_timeout=args.agent_call_timeout,
            host=args.agent_host,
            pays=not judged,
            **shared,
        )
    if not has_turns:
        return None
    if environments is None:
        box = Toolbox.of(tools or (), tokenizer, args.environment_timeout)
        options: dict[str, Any] = {
            "environment_factory": lambda: ToolEnvironment(box),
            "timeout": None,  # each call has its own
            "tools": box.schemas,
        }
    else:
        options = environments.runner_options(tokenizer, args.environment_timeout, tools or ())
    return EpisodeRunner(**shared, **options)
