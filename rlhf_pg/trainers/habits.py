"""Arguments of other libraries' trainers, which are one error that says what to use."""

import dataclasses
import inspect
from typing import Any

from rlhf_pg.config.foreign_keys import explained_argument


def refuse_foreign(trainer_type: Any, given: dict[str, Any]) -> None:
    """Refuse arguments that a trainer of another library takes and this one does not.

    An argument that nobody knows is left to Python.

    Raises:
        TypeError: there are some; the message says what to use in place of each.
    """
    known = {
        name
        for base in trainer_type.__mro__
        if "__init__" in vars(base)
        for name in inspect.signature(base.__init__).parameters
    }
    config = trainer_type.config_type
    keys = [field.name for field in dataclasses.fields(config)]
    said = [explained_argument(name, config.__name__, keys) for name in given if name not in known]
    if any(said):
        raise TypeError(f"{trainer_type.__name__}: {'; '.join(filter(None, said))}")
