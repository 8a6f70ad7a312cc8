"""Supervised training, by the `Trainer` of transformers: examples, and what its runs share."""

from rlhf_pg.supervised.sft import train_sft as train_sft
