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
from rlhf_pg.rollout.native import NativeEngine

__all__ = [
    "Completion",
    "Finished",
    "NativeEngine",
    "Request",
    "RolloutEngine",
    "RolloutError",
    "SamplingParams",
    "Session",
]
