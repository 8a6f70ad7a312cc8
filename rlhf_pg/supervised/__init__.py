"""Supervised runs: fine-tuning and reward models."""

from rlhf_pg.supervised.sft import train_sft as train_sft
