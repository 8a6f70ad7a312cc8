"""Processes and devices: the only package that depends on how a model is distributed.

The rest of the code uses a few verbs: gather, all_reduce_sum and barrier of all processes;
micro_batch, backward and step of the trained module; and the full weights of a sharded module.
"""

from rlhf_pg.runtime.ddp import DDPBackend as DDPBackend
from rlhf_pg.runtime.ddp import FullWeights as FullWeights
from rlhf_pg.runtime.ddp import State as State
from rlhf_pg.runtime.ddp import full as full
from rlhf_pg.runtime.ddp import gathered as gathered
from rlhf_pg.runtime.ddp import hollow as hollow
from rlhf_pg.runtime.ddp import put as put
from rlhf_pg.runtime.ddp import put_in_place as put_in_place
from rlhf_pg.runtime.processes import Runtime as Runtime
from rlhf_pg.runtime.processes import RuntimeBeside as RuntimeBeside
from rlhf_pg.runtime.termination import Terminated as Terminated
from rlhf_pg.runtime.termination import Termination as Termination
from rlhf_pg.runtime.termination import broadcasts_failure as broadcasts_failure
