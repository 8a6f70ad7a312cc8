"""The policy, its frozen reference and its critic, and loading them."""

from rlhf_pg.models.adapters import (
    MOST_LOST as MOST_LOST,
    adapter_of as adapter_of,
    adapts_tied_weights as adapts_tied_weights,
    add_adapter as add_adapter,
    is_quantized as is_quantized,
    merge as merge,
    merge_loss as merge_loss,
)
from rlhf_pg.models.attention import (
    max_positions as max_positions,
    settle_positions as settle_positions,
)
from rlhf_pg.models.critic import (
    ActorCritic as ActorCritic,
    Critic as Critic,
    Models as Models,
    assemble as assemble,
    new_critic as new_critic,
)
from rlhf_pg.models.lm_head import chunk_size_for as chunk_size_for, evaluating as evaluating
from rlhf_pg.models.loading import (
    about as about,
    add_stop_tokens as add_stop_tokens,
    check_code as check_code,
    check_directory as check_directory,
    check_options as check_options,
    from_pretrained as from_pretrained,
    has_tokenizer as has_tokenizer,
    init_options as init_options,
    is_adapter as is_adapter,
    load_model as load_model,
    load_policy as load_policy,
    load_tokenizer as load_tokenizer,
    load_weights as load_weights,
    opening as opening,
    place as place,
    policy_of as policy_of,
    quantization as quantization,
    set_options as set_options,
    stop_token_ids as stop_token_ids,
    tokenizer_from_pretrained as tokenizer_from_pretrained,
    tokenizer_of as tokenizer_of,
)
from rlhf_pg.models.policy import (
    Policy as Policy,
    PolicyOutput as PolicyOutput,
    Reference as Reference,
    Teacher as Teacher,
    checkpoint_activations as checkpoint_activations,
    disable_dropout as disable_dropout,
    fingerprint as fingerprint,
)
