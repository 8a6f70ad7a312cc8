"""Processes and devices, the only package that knows how a model is distributed.

The rest of the code uses a few verbs: gather, all_reduce_sum, all_reduce_max and barrier of all
processes; micro_batch, backward and step of the trained module; and access to the full weights of a
sharded module.
"""

from rlhf_pg.runtime.collective_writes import Writing
from rlhf_pg.runtime.ddp import DDPBackend, State
from rlhf_pg.runtime.full_weights import FullWeights, gathered
from rlhf_pg.runtime.processes import Runtime
from rlhf_pg.runtime.termination import Termination
from rlhf_pg.runtime.watchdog import Terminated, broadcasts_failure
