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
from rlhf_pg.rollout.multi_turn.environment import Environment, EnvironmentFactory, Observation
from rlhf_pg.rollout.multi_turn.episodes import Episode, EpisodeRunner
from rlhf_pg.rollout.multi_turn.tools import Tool, Toolbox, ToolEnvironment
from rlhf_pg.rollout.native.engine import NativeEngine
