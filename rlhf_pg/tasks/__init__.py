"""Tasks by name: embedded ones, which a tiny model learns on a CPU, and other libraries'."""

from collections.abc import Mapping
from typing import Any

from rlhf_pg.tasks.arithmetic import arithmetic
from rlhf_pg.tasks.multi_turn import calculator, guess
from rlhf_pg.tasks.preference import preference
from rlhf_pg.tasks.task import Demonstration as Demonstration, Task as Task

TASKS = {task.__name__: task for task in (arithmetic, preference, guess, calculator)}


def load_task(name: str, options: Mapping[str, Any] | None = None, seed: int = 42) -> Task:
    """Load a task by name: a key of `TASKS`, reasoning_gym:NAME, verifiers:NAME or openenv:URL.

    `options` are for a third-party task, and `seed` for the data it generates. ValueError if there
    is no such task, its package is missing, or an option is unknown.
    """
    if name in TASKS:
        return TASKS[name]()
    source, _, generator = name.partition(":")
    if source == "reasoning_gym":
        from rlhf_pg.tasks.reasoning_gym import reasoning_gym_task

        return reasoning_gym_task(generator, options or {}, seed)
    from rlhf_pg.episodes.adapters import load_task as adapted

    return Task(name=name, **adapted(name, options, seed)._asdict())
