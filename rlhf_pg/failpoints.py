"""Failpoints: places where a run can be made to fail, as machines do.

`RLHF_PG_FAULT=<point>:<action>` fails when the point is first passed, `<point>:<action>@<n>` when
it is passed for the n-th time; actions are kill, enospc and eio.
"""

import errno
import os
import signal
from collections import Counter

ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}

_passed: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """Fail here, if `RLHF_PG_FAULT` says so."""
    name, _, rest = os.environ.get("RLHF_PG_FAULT", "").partition(":")
    if name != point:
        return
    action, _, number = rest.partition("@")
    _passed[point] += 1
    if _passed[point] != int(number or 1):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(ERRORS[action], os.strerror(ERRORS[action]))
