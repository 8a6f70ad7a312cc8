"""What ends a completion before its length does."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Stopping:
    """EOS ids, and strings that are looked for in the decoded text, never by tokenizing again.

    Raises:
        ValueError: strings without a tokenizer.
    """

    eos_token_ids: Collection[int]
    strings: Sequence[str] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings are matched on text: give NativeEngine a tokenizer")

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a completion of these tokens, which was not over before the last, is over."""
        return tokens[-1] in self.eos_token_ids or self.ends_text(tokens)

    def ends_text(self, tokens: Sequence[int]) -> bool:
        """Whether their text has one of the strings."""
        if self.tokenizer is None or not self.strings:
            return False
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in self.strings)
