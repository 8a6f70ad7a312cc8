"""Configs of all algorithms: every key with its default, its range and a help text.

`rlhf_pg.config.parse` reads a config from YAML and flags. Batch sizes are over all processes.
"""

from rlhf_pg.config.algorithms import (
    GRPOConfig as GRPOConfig,
    PolicyGradientConfig as PolicyGradientConfig,
    PPOConfig as PPOConfig,
    ReinforceConfig as ReinforceConfig,
    RLOOConfig as RLOOConfig,
)
from rlhf_pg.config.fields import config as config, option as option
from rlhf_pg.config.parse import dump as dump, parse as parse
from rlhf_pg.config.supervised import RewardModelConfig as RewardModelConfig, SFTConfig as SFTConfig
