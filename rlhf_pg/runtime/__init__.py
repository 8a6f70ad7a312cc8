"""Processes and devices: the only package that knows how a model is distributed.

Everything else sees a few verbs: of all processes gather, total, most and wait; of what is trained
micro_batch, backward and step; and a module that lies in pieces can be had whole. The trackers are
here too, since it is accelerate that knows them.
"""

from rlhf_pg.runtime.failures import Terminated, announced
from rlhf_pg.runtime.layouts import LAYOUTS, Layout, kept
from rlhf_pg.runtime.processes import Runtime
from rlhf_pg.runtime.signals import Termination
from rlhf_pg.runtime.trackers import Trackers
from rlhf_pg.runtime.trained import State, Trained
from rlhf_pg.runtime.weights import Whole, gathered
from rlhf_pg.runtime.writing import Writing

__all__ = [
    "LAYOUTS",
    "Layout",
    "Runtime",
    "State",
    "Terminated",
    "Termination",
    "Trackers",
    "Trained",
    "Whole",
    "Writing",
    "announced",
    "gathered",
    "kept",
]
