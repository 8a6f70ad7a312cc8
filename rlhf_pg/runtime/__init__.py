"""Processes and devices: the only package that knows how a model is distributed.

Everything else sees a few verbs: prepare, micro_batch, backward, clip, gather and total. The
trackers are here too, since it is accelerate that knows them.
"""

from rlhf_pg.runtime.processes import Runtime
from rlhf_pg.runtime.trackers import Trackers

__all__ = ["Runtime", "Trackers"]
