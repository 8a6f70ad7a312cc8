"""The models that the recipes name: configs with the published dimensions, without weights."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlhf_pg.tasks.tiny import character_tokenizer

_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
PYTHIA = "EleutherAI/pythia-1b-deduped"

# The config.json of each model on the Hub, in what decides about sizes and kernels.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN
    | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
    | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"max_position_embeddings": 32768},
    "Qwen/Qwen3-1.7B": _QWEN
    | {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "max_position_embeddings": 40960},
    "Qwen/Qwen2.5-7B-Instruct": {"vocab_size": 152064, "tie_word_embeddings": False}
    | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944}
    | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"max_position_embeddings": 32768},
    "meta-llama/Llama-3.1-8B-Instruct": {"vocab_size": 128256, "tie_word_embeddings": False}
    | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 131072},
    PYTHIA: {"vocab_size": 50304, "tie_word_embeddings": False}
    | {"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_hidden_layers": 16, "num_attention_heads": 8, "max_position_embeddings": 2048},
}
# Their parameters in millions, as their model cards or the weights on the Hub say.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494.0,
    "Qwen/Qwen3-1.7B": 1720.6,
    "Qwen/Qwen2.5-7B-Instruct": 7615.6,
    "meta-llama/Llama-3.1-8B-Instruct": 8030.3,
    PYTHIA: 1011.8,
}
# What the recipes leave in directories, by the model that they started from.
LEFT_BY_RECIPES = {"runs/tldr_sft/final": PYTHIA, "runs/tldr_reward_model/final": PYTHIA}

# Qwen3's template answers without thinking by closing the thoughts before they begin.
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}"
    "{% endif %}{% endif %}"
)


def published(name: str) -> PretrainedConfig:
    """The config of a model that a recipe names, by its Hub id or by the recipe that leaves it."""
    fields = dict(PUBLISHED[LEFT_BY_RECIPES.get(name, name)])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of ASCII characters with the pad tokens that recipes name."""
    made = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    made.add_tokens(["<|finetune_right_pad_id|>", "<|padding|>"], special_tokens=True)
    # A newline is a character too, which "." would not find.
    made.backend_tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    made.chat_template = TEMPLATE
    return made


def full_model(name: str) -> PreTrainedModel:
    """The whole model, for the meta device."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(published(name))
    return model


def depth(layers: int) -> dict[str, Any]:
    """What changes in a config with so many layers."""
    return {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}


def save_blueprint(name: str, directory: Path, **changes: Any) -> Path:
    """Save the config of a model at full width, without weights, and a tokenizer."""
    _changed(published(name), changes).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def save_small(
    name: str, directory: Path, real_tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Save the same architecture at small width, with random weights and a tokenizer: one of
    characters, or the model's own, with its vocabulary.

    It has more ids than its tokenizer, as the real ones have.
    """
    torch.manual_seed(0)
    made = real_tokenizer or tokenizer()
    special = {"pad_token_id": made.pad_token_id, "eos_token_id": made.eos_token_id}
    small = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": made.bos_token_id}
    if real_tokenizer is None:
        small["vocab_size"] = 128
    config = _changed(published(name), small | special | depth(2))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    made.save_pretrained(directory)
    return directory


def _changed(config: PretrainedConfig, changes: dict[str, Any]) -> PretrainedConfig:
    """The config with other values of the fields that it has."""
    for key, value in changes.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config
