"""The policy, its frozen reference, and how both are loaded."""

from rlhf_pg.models.loading import (
    disable_dropout,
    load_model,
    load_tokenizer,
    max_positions,
    stop_token_ids,
)
from rlhf_pg.models.policy import Policy, PolicyOutput
from rlhf_pg.models.reference import Reference

__all__ = [
    "Policy",
    "PolicyOutput",
    "Reference",
    "disable_dropout",
    "load_model",
    "load_tokenizer",
    "max_positions",
    "stop_token_ids",
]
