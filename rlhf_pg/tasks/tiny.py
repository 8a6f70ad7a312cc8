"""Tokenizers of characters or words, and a decoder of 0.5M parameters, in the standard formats."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD = "<pad>"
EOS = "<eos>"
TURNS = ["<user>", "<assistant>"]
TOOLS = ["<tools>", "<tool>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# The chat begins with only the names of the tools, which is enough for a tiny model.
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}"
    "{% endif %}" + CHAT_TEMPLATE
)


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of characters, pad, EOS and the marks of a chat's turns."""
    isolated = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return _tokenizer(characters, isolated, decoders.Fuse())


def tool_tokenizer(characters: str, pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a character tokenizer with a token for each of the longer `pieces` of tool calls."""
    tokenizer = character_tokenizer(characters)
    tokenizer.add_special_tokens({"additional_special_tokens": TURNS + TOOLS})
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of words separated by spaces, pad, EOS and the marks of a chat's turns."""
    return _tokenizer(words, pre_tokenizers.WhitespaceSplit())


def _tokenizer(tokens: Iterable[str], splits: Any, decoder: Any = None) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *TURNS, *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = splits
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=TURNS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_decoder(tokenizer: PreTrainedTokenizerFast, max_positions: int = 64) -> PreTrainedModel:
    """Make a Qwen3 of about half a million parameters, with tied embeddings and random weights."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ids,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model
