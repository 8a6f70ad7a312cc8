"""Which engine samples: what `rollout_engine` names."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.config.sampling import SamplingConfig
from rlhf_pg.rollout.engine import RolloutEngine
from rlhf_pg.rollout.native import NativeEngine
from rlhf_pg.rollout.vllm import VllmEngine
from rlhf_pg.rollout.vllm_server import VllmServerEngine


def new_engine(
    args: SamplingConfig,
    model: PreTrainedModel,
    eos_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    is_main: bool,
) -> RolloutEngine:
    """The engine of a run, or this process's own.

    Args:
        model: the policy, which has its weights when the engine takes them over.
        is_main: of several processes, the one that hands weights to a server.

    Raises:
        ValueError: the engine cannot be had, or cannot sample from the model.
        RolloutError: the server does not answer.
    """
    if args.rollout_engine == "vllm":
        return VllmEngine(
            model,
            eos_token_ids,
            tokenizer,
            max_model_length=args.vllm_max_model_length,
            memory=args.vllm_gpu_memory_utilization,
            sleeps=args.vllm_enable_sleep_mode,
            seed=args.seed,
        )
    if args.rollout_engine == "vllm_server":
        directory = args.vllm_sync_directory or Path(args.output_dir) / "sync"
        return VllmServerEngine(
            model,
            eos_token_ids,
            args.vllm_server_base_url,
            Path(directory),
            timeout=args.vllm_server_timeout,
            is_main=is_main,
        )
    return NativeEngine(
        model, eos_token_ids, tokenizer.pad_token_id, tokenizer, args.rollout_cache_tokens
    )
