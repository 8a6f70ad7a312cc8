"""Failpoints: places where a run can be made to fail, as machines do.

`RLHF_PG_FAULT=<point>:<action>` fails when the point is passed for the first time, and
`<point>:<action>@<n>` when it is passed for the n-th time. Without it a failpoint does nothing.
"""

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable

# Every point, and when it is passed.
POINTS = {
    "rollout": "before the completions of a step are sampled",
    "reward": "before the completions are scored",
    "backward": "before the backward pass of a micro-batch",
    "step": "before the optimizer's step",
    "stepped": "after a step, before its line in metrics.jsonl",
    "probe": "before the first step, when writing to output_dir is tried",
    # While a checkpoint, best/ or final/ is saved.
    "save-begin": "before the first file is written",
    "save-models": "when the models are written",
    "save-tensors": "when the optimizer, then the random states are written",
    "save-state": "before state.json is written",
    "save-rename": "before the complete directory gets its name",
    "save-aside": "after the directory that it replaces was moved aside",
    "save-renamed": "after the new directory has its name",
    "prune": "before an old checkpoint is removed",
    "pruning": "after an old checkpoint has lost its name",
}


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "enospc": lambda: _raise(errno.ENOSPC),
    "eio": lambda: _raise(errno.EIO),
}

_passed: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Fail here, if `RLHF_PG_FAULT` says so.

    Raises:
        ValueError: it names an unknown point or action.
    """
    wanted = os.environ.get("RLHF_PG_FAULT")
    if not wanted:
        return
    name, action, number = _parsed(wanted)
    if name != point:
        return
    _passed[point] += 1
    if _passed[point] == number:
        ACTIONS[action]()


def _parsed(wanted: str) -> tuple[str, str, int]:
    name, _, rest = wanted.partition(":")
    action, _, number = rest.partition("@")
    if name not in POINTS or action not in ACTIONS or not (number or "1").isdigit():
        raise ValueError(
            f"RLHF_PG_FAULT must be <point>:<action>[@<n>], got {wanted!r}; points are "
            f"{', '.join(POINTS)}; actions are {', '.join(ACTIONS)}"
        )
    return name, action, int(number or 1)
