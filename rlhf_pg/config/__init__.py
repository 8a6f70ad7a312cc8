"""Configs of all algorithms: every key with its default, its range and a help text.

`rlhf_pg.config.parse` reads a config from YAML and flags. Batch sizes are over all processes.
"""

from rlhf_pg.config.algorithms import GRPOConfig as GRPOConfig
from rlhf_pg.config.algorithms import PolicyGradientConfig as PolicyGradientConfig
from rlhf_pg.config.algorithms import PPOConfig as PPOConfig
from rlhf_pg.config.algorithms import ReinforceConfig as ReinforceConfig
from rlhf_pg.config.algorithms import RLOOConfig as RLOOConfig
from rlhf_pg.config.fields import config as config
from rlhf_pg.config.fields import option as option
from rlhf_pg.config.parse import dump as dump
from rlhf_pg.config.parse import parse as parse
from rlhf_pg.config.supervised import RewardModelConfig as RewardModelConfig
from rlhf_pg.config.supervised import SFTConfig as SFTConfig
