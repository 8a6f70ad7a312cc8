"""Processes and devices: the only package that depends on how a model is distributed.

The rest of the code uses a few verbs: gather, all_reduce_sum and barrier of all processes;
micro_batch, backward and step of the trained module; and the full weights of a sharded module.
"""

from rlhf_pg.runtime.ddp import (
    DDPBackend as DDPBackend,
    FullWeights as FullWeights,
    State as State,
    full as full,
    gathered as gathered,
    hollow as hollow,
    put as put,
    put_in_place as put_in_place,
)
from rlhf_pg.runtime.processes import Runtime as Runtime, ThreadRuntime as ThreadRuntime
from rlhf_pg.runtime.termination import (
    Terminated as Terminated,
    Termination as Termination,
    broadcasts_failure as broadcasts_failure,
)
