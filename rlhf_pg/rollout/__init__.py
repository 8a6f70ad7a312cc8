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
from rlhf_pg.rollout.multi_turn.environment import (
    Environment,
    EnvironmentFactory,
    Observation,
)
from rlhf_pg.rollout.multi_turn.episodes import (
    Episode,
    EpisodeRunner,
)
from rlhf_pg.rollout.multi_turn.tools import (
    EnvironmentSource,
    Tool,
    Toolbox,
    ToolEnvironment,
    source_of,
)
from rlhf_pg.rollout.native.engine import (
    NativeEngine,
)

__all__ = [
    "Completion",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentSource",
    "Episode",
    "EpisodeRunner",
    "Finished",
    "NativeEngine",
    "Observation",
    "Request",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "Session",
    "Tool",
    "ToolEnvironment",
    "Toolbox",
    "source_of",
]
