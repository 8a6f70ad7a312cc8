"""The embedded default: a tiny model and a task that it learns on a CPU within minutes."""

from rlhf_pg.tasks.arithmetic import arithmetic
from rlhf_pg.tasks.task import Task

TASKS = {"arithmetic": arithmetic}

__all__ = ["TASKS", "Task", "arithmetic"]
