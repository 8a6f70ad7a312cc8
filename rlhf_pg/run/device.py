"""What `dtype: auto` means in this run."""

from pathlib import Path

import torch

from rlhf_pg.checkpoint import atomic
from rlhf_pg.config.run import TrainingConfig
from rlhf_pg.runtime import Runtime


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
