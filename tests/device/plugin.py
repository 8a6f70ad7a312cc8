"""`pytest -p tests.device.plugin`: every test of the process is on the pretend device."""

from tests.device.pretend import cuda

cuda.install()
