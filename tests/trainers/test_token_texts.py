"""The texts of tokens, which together are the text of the completion."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_pg.trainers.recorder import token_texts


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every byte, as GPT-2's has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@pytest.mark.parametrize("text", ["naïve 日本", "👍 ok", "\u202eabc\x1b[31m", ""])
def test_texts_together_are_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) == len(text.encode())
    assert "".join(texts) == text


def test_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a日b")["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", "", "", "日", "b"]
    assert token_texts(tokenizer, ids[:3]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that falls back to bytes, as those of Llama and Gemma do."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"a": 256, "日": 257}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_bytes_that_are_no_text_are_shown_and_raise_nothing() -> None:
    """A policy may sample them; they change how the bytes before them are decoded."""
    unknown = "\N{REPLACEMENT CHARACTER}"
    texts = token_texts(byte_fallback_tokenizer(), [82, 76, 235, 190, 257, 256])
    assert texts == ["R", "L", "", "", f"{unknown * 2}日", "a"]
    shuffled = random.Random(0)
    for _ in range(200):
        ids = [shuffled.randrange(258) for _ in range(12)]
        assert len(token_texts(byte_fallback_tokenizer(), ids)) == 12


def test_end_is_what_its_tokens_decode_to() -> None:
    unknown = "\N{REPLACEMENT CHARACTER}"
    tokenizer = byte_tokenizer()
    first = tokenizer("日")["input_ids"][0]  # of three bytes
    assert token_texts(tokenizer, [first, first]) == ["", unknown * 2]
    # A model may have more ids than its tokenizer.
    assert token_texts(tokenizer, [*tokenizer("a")["input_ids"], len(tokenizer)]) == ["a", ""]


def test_tokenizer_without_a_fast_one_decodes_token_by_token() -> None:
    class Slow:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i) for i in ids)

    assert token_texts(Slow(), [0, 2]) == ["a", "c"]  # type: ignore[arg-type]
