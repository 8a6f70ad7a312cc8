"""The text of each token, for readers."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return a text for each token, which together are what the ids decode to.

    Special tokens are shown. A token that ends within a character has an empty text, and the one
    that completes the character has it. Bytes that are no text are shown as U+FFFD, with some
    tokenizers other ones than where all ids are decoded at once.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([token]) for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    texts: list[str] = []
    silent: list[int] = []  # tokens whose text is still to come
    for token in ids:
        silent.append(token)
        try:
            text = stream.step(fast, token)
        except Exception:  # bytes that are no text have changed what was read before them
            text = fast.decode(silent, skip_special_tokens=False)
            stream = DecodeStream(skip_special_tokens=False)
        texts.append(text or "")
        silent = [] if text else silent
    if silent:
        texts[-1] = fast.decode(silent, skip_special_tokens=False)
    return texts
