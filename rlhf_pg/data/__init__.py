"""Prompts and chats as token ids, and the records that travel from the rollout to the update."""

from rlhf_pg.data.chat import vocabulary_fingerprint as vocabulary_fingerprint
from rlhf_pg.data.prompts import Prompts as Prompts
from rlhf_pg.data.prompts import PromptSampler as PromptSampler
from rlhf_pg.data.records import Experience as Experience
from rlhf_pg.data.records import Rollout as Rollout
