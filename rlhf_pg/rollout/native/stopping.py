"""The conditions that end a completion before its length limit."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Stopping:
    """The EOS ids, and the stop strings that are searched for in the decoded text.

    Text is never tokenized again.

    Raises:
        ValueError: there are strings but no tokenizer.
    """

    eos_token_ids: Collection[int]
    strings: Sequence[str] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        if self.strings and self.tokenizer is None:
            raise ValueError("stop strings are matched on text: give NativeEngine a tokenizer")

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether a completion is over with its last token, if it was not over before."""
        return tokens[-1] in self.eos_token_ids or self.ends_text(tokens)

    def ends_text(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of these tokens contains one of the strings."""
        if self.tokenizer is None or not self.strings:
            return False
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in self.strings)
