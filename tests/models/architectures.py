"""Language models of `transformers`, of any architecture, at tiny width."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    PretrainedConfig,
    PreTrainedModel,
)

# Names that configs have for their sizes, and what they are set to where there is such a name.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "attention_hidden_size", "lru_width"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head"], 4),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 64),
    **dict.fromkeys(["head_dim", "index_head_dim", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 40),
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "laurel_rank": 4,
    "sliding_window": 48,
    "num_kv_shared_layers": 0,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "index_n_heads": 2,
    "index_topk": 8,
    # Recurrent layers.
    **dict.fromkeys(["linear_num_key_heads", "linear_num_heads"], 2),
    **dict.fromkeys(["linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "ssm_state_size", "state_size"], 8),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim"], 16),
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    **dict.fromkeys(["swa_num_attention_heads"], 4),
    **dict.fromkeys(["swa_num_key_value_heads"], 2),
    **dict.fromkeys(["swa_head_dim"], 8),
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# What an architecture is told beyond these.
_OWN: dict[str, dict[str, Any]] = {
    "falcon": {"num_kv_heads": 4, "ffn_hidden_size": 48},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "n_groups": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_head_dim": 8},
}


def _has(config: PretrainedConfig, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # another number in every layer, as the default config of gemma4 has
        return True


def config_of(name: str, **options: Any) -> PretrainedConfig:
    """The default one with two layers of width 32, one of each kind where there are kinds."""
    text = AutoConfig.for_model(name).get_text_config(decoder=True)
    known = text.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if _has(text, key)}
    if name == "falcon":
        del sizes["head_dim"]  # which its config works out itself
    if "kv_lora_rank" in known:
        sizes |= _LATENT
    if known.get("is_decoder") is False:
        sizes["is_decoder"] = True
    if known.get("layer_types"):
        sizes["layer_types"] = (list(dict.fromkeys(known["layer_types"])) * 2)[:2]
    return type(text)(**sizes | _OWN.get(name, {}) | options)


def build(name: str, **options: Any) -> PreTrainedModel:
    """A random model in eval mode, whose logits spread so that what is wrong shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name, **options))
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def with_vision() -> PreTrainedModel:
    """A Gemma 3 as it is published, which no image is shown here."""
    text = config_of("gemma3").to_dict()
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    tower |= {"hidden_size": 16, "intermediate_size": 16}
    ids = {"image_token_index": 39, "boi_token_index": 38, "eoi_token_index": 37}
    config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)
    return AutoModelForCausalLM.from_config(config)
