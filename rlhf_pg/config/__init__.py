"""Configs of all algorithms: every key with its default, its range and its meaning.

Batch sizes are global: the number of processes is not a hyper-parameter. `rlhf_pg.config.parse`
reads a config from YAML and flags.
"""

from typing import TYPE_CHECKING, Any

from rlhf_pg.config.fields import choice as choice
from rlhf_pg.config.fields import number as number
from rlhf_pg.config.parse import dump as dump
from rlhf_pg.config.parse import parse as parse

if TYPE_CHECKING:
    from rlhf_pg.config.algorithms import GRPOConfig as GRPOConfig
    from rlhf_pg.config.algorithms import PolicyGradientConfig as PolicyGradientConfig
    from rlhf_pg.config.algorithms import PPOConfig as PPOConfig
    from rlhf_pg.config.algorithms import ReinforceConfig as ReinforceConfig
    from rlhf_pg.config.algorithms import RLOOConfig as RLOOConfig
    from rlhf_pg.config.supervised import RewardModelConfig as RewardModelConfig
    from rlhf_pg.config.supervised import SFTConfig as SFTConfig
else:

    def __getattr__(name: str) -> Any:
        """Import the configs, which know the advantages and losses by name, when first asked."""
        if not name.endswith("Config"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rlhf_pg.config import algorithms, supervised

        for module in (algorithms, supervised):
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
