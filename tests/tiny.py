"""Random models of every architecture, small enough to be exact about: nothing is downloaded."""

from typing import Any, TypeVar

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

M = TypeVar("M", bound=nn.Module)

_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2}

# What each architecture is told beyond the common shape.
ARCHS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 8},
    "gemma": _GROUPED | {"head_dim": 8},
    "mistral": _GROUPED,
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 48},
    "phi": _GROUPED,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    # A state along the row, then attention; a window shorter than most rows, sinks and experts.
    "qwen3_5_text": _GROUPED
    | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gpt_oss": _GROUPED
    | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    | {"num_local_experts": 4, "num_experts_per_tok": 2}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
_CHOSEN = _GROUPED | {"num_experts_per_tok": 2}
_LOCAL = _CHOSEN | {"num_local_experts": 4}
_BIASED = _CHOSEN | {
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
# Mixtures of experts, likewise.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": _CHOSEN | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": _CHOSEN | {"num_experts": 4},
    "deepseek_v3": _BIASED
    | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "glm4_moe": _BIASED | {"head_dim": 8},
    "minimax_m2": _LOCAL | {"head_dim": 8},
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL,
}


def tiny_model(
    arch: str,
    vocab_size: int = 40,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 0.3,
    kind: type = AutoModelForCausalLM,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model in eval mode, by default a language model; the same for the same arguments.

    Args:
        dtype: the weights are drawn in float32, so models that differ in dtype alone agree.
        scale: deviation of the noise on every parameter (biases and norms too): at 0.3 the logits
            spread by about 2, so that a wrong position or mask changes what is sampled.
        overrides: fields of the architecture's config.
    """
    known = ARCHS | MIXTURES
    config = AutoConfig.for_model(
        arch, **(_SHAPE | known.get(arch, {}) | {"vocab_size": vocab_size} | overrides)
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind.from_config(config)
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.to(dtype).eval()


def adapter(**options: Any) -> LoraConfig:
    """A small LoRA on every linear layer."""
    return LoraConfig(
        **{"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    )


def stir(module: M, seed: int = 0) -> M:
    """Noise on all that trains, so that heads and adapters no longer add nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise.to(parameter.dtype))
    return module
