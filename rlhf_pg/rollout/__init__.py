"""Rollouts: prompts in, sampled completions with their log-probabilities out."""

from rlhf_pg.rollout.engine import Completion as Completion
from rlhf_pg.rollout.engine import Finished as Finished
from rlhf_pg.rollout.engine import Request as Request
from rlhf_pg.rollout.engine import RolloutEngine as RolloutEngine
from rlhf_pg.rollout.engine import RolloutError as RolloutError
from rlhf_pg.rollout.engine import SamplingParams as SamplingParams
from rlhf_pg.rollout.engine import Session as Session
from rlhf_pg.rollout.multi_turn.environment import Environment as Environment
from rlhf_pg.rollout.multi_turn.environment import EnvironmentFactory as EnvironmentFactory
from rlhf_pg.rollout.multi_turn.environment import Observation as Observation
from rlhf_pg.rollout.multi_turn.episodes import Episode as Episode
from rlhf_pg.rollout.multi_turn.episodes import EpisodeRunner as EpisodeRunner
from rlhf_pg.rollout.multi_turn.tools import EnvironmentSource as EnvironmentSource
from rlhf_pg.rollout.multi_turn.tools import Tool as Tool
from rlhf_pg.rollout.multi_turn.tools import Toolbox as Toolbox
from rlhf_pg.rollout.multi_turn.tools import ToolEnvironment as ToolEnvironment
from rlhf_pg.rollout.multi_turn.tools import source_of as source_of
from rlhf_pg.rollout.native.engine import NativeEngine as NativeEngine
