"""The config that all algorithms share, checked as a whole."""

from dataclasses import dataclass

from rlhf_pg.config import rules
from rlhf_pg.config.method import MethodConfig


@dataclass(kw_only=True)
class PolicyGradientConfig(MethodConfig):
    """Config shared by all algorithms. One step is one rollout batch and every update on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rules.check(self)

    @property
    def warnings(self) -> list[str]:
        """Warnings, one sentence each, about settings that are allowed but seldom meant."""
        return rules.warnings(self)
