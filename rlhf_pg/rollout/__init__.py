"""Rollouts: prompts in, sampled completions with their log-probabilities out."""

from rlhf_pg.rollout.engine import (
    Completion,
    Finished,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    Session,
)
from rlhf_pg.rollout.environment import Environment, EnvironmentFactory, Observation
from rlhf_pg.rollout.episodes import Episode, Player
from rlhf_pg.rollout.native import NativeEngine
from rlhf_pg.rollout.tools import Tool, Toolbox, ToolEnvironment

__all__ = [
    "Completion",
    "Environment",
    "EnvironmentFactory",
    "Episode",
    "Finished",
    "NativeEngine",
    "Observation",
    "Player",
    "Request",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "Session",
    "Tool",
    "ToolEnvironment",
    "Toolbox",
]
