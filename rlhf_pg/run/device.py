"""What the keys of a model mean in this run, on its device."""

import logging
from pathlib import Path
from typing import Any

import torch

from rlhf_pg.checkpoint import atomic
from rlhf_pg.config.run import TrainingConfig
from rlhf_pg.run.learner import Learner
from rlhf_pg.runtime import Runtime

logger = logging.getLogger(__name__)


def auto_dtype(args: TrainingConfig, runtime: Runtime) -> str:
    """Return the dtype of the checkpoint that the run resumes, or else bfloat16 on a GPU that
    computes in it, and float32 elsewhere; collective.
    """
    resumed: str | None = runtime.gather_objects(_resumed_dtype(args))[0]
    if resumed is not None:
        return resumed
    if runtime.device.type == "cpu":
        return "float32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    return "float32"


def _resumed_dtype(args: TrainingConfig) -> str | None:
    choice = args.resume_from_checkpoint
    if not choice:
        return None
    paths = [Path(choice)]
    if choice == "latest":
        paths = sorted(Path(args.output_dir, "checkpoints").glob("step-*"), reverse=True)
    for path in paths:
        if config := atomic.state(path).get("config"):
            return str(config["dtype"])
    return None


def warn_of_attention(args: Any, learner: Learner) -> None:
    """Warn if the model's attention is chosen, but rows are packed, whose attention is ours."""
    is_packed = all(packer.window for packer in learner.packers)
    if args.attn_implementation and is_packed and learner.runtime.is_main:
        logger.warning(
            "attn_implementation %s is not used where rows are packed, and by the native engine: "
            "they compute shared prompts once, with their own attention",
            args.attn_implementation,
        )
