"""Failpoints: places where a run can be made to fail, as machines do.

`RLHF_PG_FAULT=<point>:<action>` fails when the point is passed for the first time, and
`<point>:<action>@<n>` when it is passed for the n-th time. Without it a failpoint does nothing.
"""

import errno
import os
import signal
from collections import Counter

# Every point; those of the last two lines are passed while a checkpoint, best/ or final/ is saved.
POINTS = (
    *("rollout", "reward", "backward", "step", "stepped", "probe", "prune", "pruning"),
    *("save-begin", "save-models", "save-tensors", "save-state"),
    *("save-rename", "save-aside", "save-renamed"),
)
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}

_passed: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Fail here, if `RLHF_PG_FAULT` says so.

    Raises:
        ValueError: it names an unknown point or action.
    """
    wanted = os.environ.get("RLHF_PG_FAULT")
    if not wanted:
        return
    name, _, rest = wanted.partition(":")
    action, _, number = rest.partition("@")
    if name not in POINTS or action not in ("kill", *ERRORS) or not (number or "1").isdigit():
        raise ValueError(
            f"RLHF_PG_FAULT must be <point>:<action>[@<n>], got {wanted!r}; points are "
            f"{', '.join(POINTS)}; actions are kill, {', '.join(ERRORS)}"
        )
    _passed[point] += 1
    if name != point or _passed[point] != int(number or 1):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(ERRORS[action], os.strerror(ERRORS[action]))
