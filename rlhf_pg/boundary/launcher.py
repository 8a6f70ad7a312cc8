"""The launcher that started this process (`accelerate launch`, torchrun), and its variables."""

import os

_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "FSDP_", "TORCHELASTIC_")
_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


def without_launcher() -> dict[str, str]:
    """Return the environment for a child that must not join this process's group."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _RANKS and not key.startswith(_PREFIXES)
    }


def check_precision(dtype: str) -> None:
    """Refuse a launcher's mixed precision that is not what the config computes in.

    The config alone decides on precision: a launcher's default file, which may be of another
    project, must not change the numbers of a run.

    Raises:
        ValueError: `accelerate launch` was told another `--mixed_precision`.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked == "no" or (asked == "bf16" and dtype == "bfloat16"):
        return
    remedy = "set dtype to bfloat16, whose updates keep float32 copies"
    if asked != "bf16":
        remedy = "bfloat16 is the one half precision here, which needs no scaling of the loss"
    raise ValueError(
        f"the launcher asks for --mixed_precision {asked}, and dtype is {dtype}: {remedy}, or "
        "launch with --mixed_precision no"
    )
