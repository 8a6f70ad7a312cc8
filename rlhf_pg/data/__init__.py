"""Prompts and chats as token ids, and the records that travel from the rollout to the update."""

from rlhf_pg.data.chat import (
    TooLong,
    continues,
    encode,
    encode_answer,
    text_of,
    vocabulary_fingerprint,
    whole_turn,
)
from rlhf_pg.data.prompts import (
    Prompts,
    PromptSampler,
    batches,
    check_fit,
    load_prompts,
    permutation,
)
from rlhf_pg.data.records import Experience, Rollout
