"""Failpoints: places where tests make a run fail like a machine.

`RLHF_PG_FAULT=<point>:<action>` fails when the point is first passed, `<point>:<action>@<n>` when
it is passed for the n-th time; actions are kill, enospc and eio.
"""

import errno
import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Fail here if `RLHF_PG_FAULT` names this point."""
    name, _, rest = os.environ.get("RLHF_PG_FAULT", "").partition(":")
    if name != point:
        return
    action, _, count = rest.partition("@")
    _passed[point] += 1
    if _passed[point] != int(count or 1):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, action.upper())
    raise OSError(number, os.strerror(number))
