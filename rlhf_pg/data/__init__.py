"""Prompts and chats as token ids, and the batch that goes from the rollout to the update."""

from rlhf_pg.data.batch import Batch as Batch
from rlhf_pg.data.chat import vocabulary_fingerprint as vocabulary_fingerprint
from rlhf_pg.data.prompts import (
    Prompt as Prompt,
    Prompts as Prompts,
    PromptSampler as PromptSampler,
)
from rlhf_pg.data.rows import Row as Row
