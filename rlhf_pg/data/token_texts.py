"""The text of each token, for readers."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return a text for each token, which together are what the ids decode to.

    Special tokens are shown. A token that ends within a character has an empty text, and the one
    that completes the character has it; what is never completed is shown as U+FFFD.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([token]) for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    said = [stream.step(fast, token) for token in ids]
    texts = [text or "" for text in said]
    if said and said[-1] is None:
        texts[-1] = "\N{REPLACEMENT CHARACTER}"
    return texts
