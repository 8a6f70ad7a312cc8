"""One thread: models this small gain nothing from two, and lose much when the cores are shared."""

import torch

torch.set_num_threads(1)
