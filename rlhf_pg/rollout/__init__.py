"""Rollouts: prompts in, sampled completions with their log-probabilities out."""

from rlhf_pg.rollout.engine import Completion, RolloutEngine, SamplingParams
from rlhf_pg.rollout.native import NativeEngine

__all__ = ["Completion", "NativeEngine", "RolloutEngine", "SamplingParams"]
