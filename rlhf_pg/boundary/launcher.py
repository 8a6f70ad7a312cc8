"""The launcher that started this process (`accelerate launch`, torchrun), and its variables."""

import os
import re

VARIABLES = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    "|(ACCELERATE|DEEPSPEED|FSDP|TORCHELASTIC)_.*"
)


def without_launcher() -> dict[str, str]:
    """Return the environment for a child that must not join this process's group."""
    return {key: value for key, value in os.environ.items() if not VARIABLES.fullmatch(key)}


def is_first_process() -> bool:
    """Return whether this process speaks for all."""
    # A process with RANK but without WORLD_SIZE has no launcher.
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def check_precision(dtype: str) -> None:
    """Refuse a launcher's mixed precision that is not the config's dtype (ValueError).

    A launcher's default file may belong to another project, and must not change a run's numbers.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked != "no" and (asked, dtype) != ("bf16", "bfloat16"):
        raise ValueError(
            f"the launcher asks for --mixed_precision {asked}, but dtype is {dtype}: launch with "
            "--mixed_precision no, or for bf16 set dtype to bfloat16, whose master weights are "
            "float32"
        )
