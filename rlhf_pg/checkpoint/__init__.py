"""The files of a run: its directory, its checkpoints and its final model."""

from rlhf_pg.checkpoint.checkpointer import Checkpointer as Checkpointer, TrainState as TrainState
