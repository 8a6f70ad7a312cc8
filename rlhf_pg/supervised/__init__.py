"""Supervised runs: fine-tuning and reward models."""

from rlhf_pg.supervised.bradley_terry import train_reward_model as train_reward_model
from rlhf_pg.supervised.sft import train_sft as train_sft
