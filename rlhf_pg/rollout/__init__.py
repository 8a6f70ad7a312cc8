"""Rollouts: prompts in, sampled completions with their log-probabilities out."""

from rlhf_pg.rollout.engine import (
    Completion as Completion,
    Finished as Finished,
    Request as Request,
    RolloutEngine as RolloutEngine,
    RolloutError as RolloutError,
    SamplingParams as SamplingParams,
    Session as Session,
)
from rlhf_pg.rollout.multi_turn.environment import (
    Environment as Environment,
    EnvironmentFactory as EnvironmentFactory,
    Observation as Observation,
)
from rlhf_pg.rollout.multi_turn.episodes import Episode as Episode, EpisodeRunner as EpisodeRunner
from rlhf_pg.rollout.multi_turn.tools import (
    EnvironmentSource as EnvironmentSource,
    Tool as Tool,
    Toolbox as Toolbox,
    ToolEnvironment as ToolEnvironment,
    source_of as source_of,
)
from rlhf_pg.rollout.native.engine import NativeEngine as NativeEngine
