"""The trainers on a pretend CUDA device: see `tests.device.pretend`."""
