"""Processes and devices: the only package that knows how a model is distributed.

Everything else sees a few verbs: of all processes gather, all_reduce_sum, all_reduce_max and
barrier; of what is trained micro_batch, backward and step; and a module that lies in pieces can be
had whole.
"""

from rlhf_pg.runtime.collective_writes import Writing
from rlhf_pg.runtime.ddp import DDPBackend, State
from rlhf_pg.runtime.full_weights import FullWeights, gathered
from rlhf_pg.runtime.processes import Runtime
from rlhf_pg.runtime.termination import Termination
from rlhf_pg.runtime.watchdog import Terminated, broadcasts_failure
