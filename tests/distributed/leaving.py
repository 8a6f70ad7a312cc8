"""A process that ends while somebody still holds its group, as FSDP2's modules do.

python -m tests.distributed.leaving, in every process
"""

import torch
from torch import distributed

from rlhf_pg.runtime.processes import Runtime

NUMBERS = 10**6  # enough that this process is at its end before they are exchanged

runtime = Runtime()
held = distributed.group.WORLD
distributed.barrier()
distributed.all_reduce(torch.ones(NUMBERS), async_op=True)
