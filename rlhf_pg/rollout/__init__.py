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
from rlhf_pg.rollout.native.engine import NativeEngine as NativeEngine
