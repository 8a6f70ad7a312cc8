"""Rewards: functions that score completions."""

from rlhf_pg.rewards.functions import RewardFunction, Rewards

__all__ = ["RewardFunction", "Rewards"]
