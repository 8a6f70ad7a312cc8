"""With this folder in PYTHONPATH and PRETEND_CUDA=2, a process has two pretend GPUs and NCCL.

Python imports it before anything else, and so before torch.
"""

import os
import sys
from pathlib import Path

# `ldconfig`: a child of triton's, to which the environment is handed down.
if os.environ.get("PRETEND_CUDA") and not any("ldconfig" in a for a in sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.device.pretend import cuda, nccl

    cuda.install(int(os.environ["PRETEND_CUDA"]))
    nccl.install()
