"""Who has started this process, which the package looks at before it imports anything else: that
takes seconds, and loading a model minutes, in which a launcher may die.
"""

import os

_BORN = os.getpid(), os.getppid()


def launcher() -> int:
    """The id of the process that has started this one, and may be gone; of a fork, its parent."""
    process, parent = _BORN
    return parent if process == os.getpid() else os.getppid()
