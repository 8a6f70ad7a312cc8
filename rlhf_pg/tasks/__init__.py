"""The embedded default: a tiny model, and tasks that it learns on a CPU within minutes."""

from rlhf_pg.tasks.arithmetic import arithmetic
from rlhf_pg.tasks.calculator import calculator
from rlhf_pg.tasks.guess import guess
from rlhf_pg.tasks.preference import preference
from rlhf_pg.tasks.task import Demonstration as Demonstration
from rlhf_pg.tasks.task import Task as Task

TASKS = {
    "arithmetic": arithmetic,
    "preference": preference,
    "guess": guess,
    "calculator": calculator,
}
