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
