"""Supervised training with the `Trainer` of transformers."""

from rlhf_pg.supervised.sft import train_sft as train_sft
