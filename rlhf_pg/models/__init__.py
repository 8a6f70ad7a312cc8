"""The policy, its frozen reference and its critic, and how they are loaded."""

from rlhf_pg.models.adapters import (
    MOST_LOST,
    adapts_tied_weights,
    add_adapter,
    load_weights,
    lora_config,
    lost_in_merge,
    merged,
    quantized,
)
from rlhf_pg.models.critic import ActorCritic, Critic, ValueHead, new_critic
from rlhf_pg.models.lm_head import ChunkedLMHead, chunk_size_for, num_chunks
from rlhf_pg.models.loading import (
    load_model,
    load_policy,
    max_positions,
    quantization,
)
from rlhf_pg.models.logit_transform import LogitTransform, logit_transform_of
from rlhf_pg.models.modes import checkpoint_activations, checkpoints, disable_dropout, evaluating
from rlhf_pg.models.policy import Policy, PolicyOutput
from rlhf_pg.models.pretrained import (
    about,
    check_directory,
    from_pretrained,
    opening,
    tokenizer_from_pretrained,
)
from rlhf_pg.models.reference import Reference, fingerprint
from rlhf_pg.models.rotary import settle_positions
from rlhf_pg.models.softmax import token_scores
from rlhf_pg.models.tokenizers import (
    check_vocabulary,
    has_tokenizer,
    load_tokenizer,
    stop_token_ids,
)
