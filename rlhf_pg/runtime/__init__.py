"""Processes and devices: the only package that knows how a model is distributed.

Everything else sees a few verbs: of all processes gather, total, most and wait; of what is trained
micro_batch, backward and step; and a module that lies in pieces can be had whole.
"""

from rlhf_pg.runtime.collective_writes import Writing
from rlhf_pg.runtime.ddp import State, Trained
from rlhf_pg.runtime.full_weights import Whole, gathered
from rlhf_pg.runtime.processes import Runtime
from rlhf_pg.runtime.termination import Termination
from rlhf_pg.runtime.watchdog import Terminated, announced

__all__ = [
    "Runtime",
    "State",
    "Terminated",
    "Termination",
    "Trained",
    "Whole",
    "Writing",
    "announced",
    "gathered",
]
