"""Every causal language model that `transformers` can build, at tiny width."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 40
LARGEST = 3_000_000  # parameters: what is larger has a size of its own that nobody named here

# Names that configs have for their sizes, and what they are set to where there is such a name.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "attention_hidden_size", "lru_width"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "dim_feedforward"], 48),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 64),
    **dict.fromkeys(["head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "state_size"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_n_groups"], 4),
    **dict.fromkeys(["mamba_d_head", "mamba_headdim"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "sliding_window": 48,
    "num_kv_shared_layers": 0,
    "embedding_size": 16,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 2,
    "index_topk": 8,
    "num_memory_blocks": 1,
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
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {"head_dim": 8},
    "dots1": {"n_shared_experts": 1, "num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"num_kv_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mvp": {"prompt_length": 4, "prompt_mid_dim": 8},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 40,
        "shape_embed_dim": 8,
        "shape_vocab_size": 40,
    },
}

# Which its config works out itself.
_WITHOUT = {"falcon": ["head_dim"], "prophetnet": ["num_hidden_layers"]}


def _has(config: PretrainedConfig, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # another number in every layer, as the default config of gemma4 has
        return True


def config_of(name: str, **options: Any) -> PretrainedConfig:
    """The default one with two layers of width 32, one of each kind where there are kinds."""
    whole = AutoConfig.for_model(name)
    text = whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    known = text.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if _has(text, key)}
    if name in _WITHOUT:
        sizes = {key: value for key, value in sizes.items() if key not in _WITHOUT[name]}
    if "kv_lora_rank" in known:
        sizes |= _LATENT
    if known.get("is_decoder") is False and not text.is_encoder_decoder:
        sizes["is_decoder"] = True
    if isinstance(known.get("num_attention_heads_per_layer"), list):
        sizes["num_attention_heads_per_layer"] = [4, 4]
    if known.get("layer_types"):
        sizes["layer_types"] = (list(dict.fromkeys(known["layer_types"])) * 2)[:2]
    return type(text)(**sizes | _OWN.get(name, {}) | options)


def build(name: str, **options: Any) -> PreTrainedModel:
    """A random model in eval mode, whose logits spread so that what is wrong shows.

    Raises:
        Exception: of any kind, where it cannot be built so small.
    """
    config = config_of(name, **options)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
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


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """What takes longer is broken off."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
