"""Importing this makes the pretend device, for which `torch.compile` generates code."""

from tests.device.pretend import cuda

cuda.install(compiles=True)
