"""Configs of all algorithms: every key with its default, its range and its meaning.

Batch sizes are global: the number of processes is not a hyper-parameter. `rlhf_pg.config.parse`
reads a config from YAML and flags.
"""

from rlhf_pg.config.algorithms import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.config.fields import choice, number
from rlhf_pg.config.parse import dump, parse
from rlhf_pg.config.policy_gradient import PolicyGradientConfig
from rlhf_pg.config.supervised import RewardModelConfig, SFTConfig
