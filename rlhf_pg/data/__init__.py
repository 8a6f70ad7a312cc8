"""Prompts and chats as token ids, and the records that travel from the rollout to the update."""

from rlhf_pg.data.chat import TooLong as TooLong
from rlhf_pg.data.chat import continues as continues
from rlhf_pg.data.chat import encode as encode
from rlhf_pg.data.chat import encode_answer as encode_answer
from rlhf_pg.data.chat import text_of as text_of
from rlhf_pg.data.chat import vocabulary_fingerprint as vocabulary_fingerprint
from rlhf_pg.data.chat import whole_turn as whole_turn
from rlhf_pg.data.prompts import Prompts as Prompts
from rlhf_pg.data.prompts import PromptSampler as PromptSampler
from rlhf_pg.data.prompts import batches as batches
from rlhf_pg.data.prompts import check_fit as check_fit
from rlhf_pg.data.prompts import load_prompts as load_prompts
from rlhf_pg.data.prompts import permutation as permutation
from rlhf_pg.data.records import Experience as Experience
from rlhf_pg.data.records import Rollout as Rollout
