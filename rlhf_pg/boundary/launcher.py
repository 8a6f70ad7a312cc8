"""The process that started this one.

The package looks before it imports anything else: imports take seconds and loading a model minutes,
in which a launcher may die.
"""

import os

_BORN = os.getpid(), os.getppid()


def launcher() -> int:
    """Return the id of the process that started this one, of a fork its parent; it may be gone."""
    process, parent = _BORN
    return parent if process == os.getpid() else os.getppid()


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
