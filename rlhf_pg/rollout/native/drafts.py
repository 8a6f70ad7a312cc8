"""Drafts: the tokens that earlier completions suggest for the next ones.

A policy that has learnt something writes again what it wrote before: for the same prompt in the
last epoch, in another sample of the group, or in the prompt itself. What followed there is put
before the model as a draft, several tokens in one pass. The noise of a position is fixed, so its
logits alone say which token it has. A draft is kept as far as it agrees, and what is sampled is
what would have been sampled without it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rlhf_pg.rollout.native.pace import Pace

CONTEXT = 4  # tokens that have to be the same for what followed them to be suggested
BITS = 20  # of a token id within the key of a context
MOST_KEPT = 2**22  # tokens of all prompts
MOST_SEQUENCES = 32  # of a prompt, the latest
LONGEST = 16  # tokens of a draft

FADING = 0.9  # of what a row's last guesses tell about its next
MASK = (1 << (BITS * CONTEXT)) - 1

Draft: TypeAlias = "array[int]"
NOTHING: Draft = array("i")


class History:
    """The completions of earlier rollouts, by prompt, of which the oldest are forgotten.

    Args:
        most: tokens kept, of prompts and completions.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most, self.size = most, 0
        self.sequences: OrderedDict[bytes, list[Draft]] = OrderedDict()
        self.pace = Pace()

    def of(self, prompt: bytes) -> list[Draft]:
        """Return what was sampled for a prompt, the latest last."""
        return self.sequences.get(prompt, [])

    def add(self, prompt: bytes, sequence: Draft) -> None:
        """Keep a completion, which begins with the last tokens before it."""
        known = self.sequences.setdefault(prompt, [])
        self.sequences.move_to_end(prompt)
        known.append(sequence)
        self.size += len(sequence)
        if len(known) > MOST_SEQUENCES:
            self.size -= len(known.pop(0))
        while self.size > self.most and len(self.sequences) > 1:
            _, forgotten = self.sequences.popitem(last=False)
            self.size -= sum(map(len, forgotten))


class Contexts:
    """The places where each run of `CONTEXT` tokens occurs last, among the texts of a prompt."""

    def __init__(self, texts: Iterable[Draft]) -> None:
        self.past: dict[int, tuple[Draft, int]] = {}
        self.present: dict[int, tuple[Draft, int]] = {}  # of rows that are being sampled
        for text in texts:
            key = 0
            for place, token in enumerate(text):
                if place >= CONTEXT:
                    self.past[key] = (text, place)
                key = _following(key, token)


def _following(key: int, token: int) -> int:
    """Return the key of a context, one token further on."""
    return ((key << BITS) | token) & MASK


class Writer:
    """A row that is being sampled, and the place in an earlier text that it seems to repeat.

    It guesses every token, drafted or not, so that it knows how often it would be right.
    """

    def __init__(self, contexts: Contexts, tokens: Sequence[int]) -> None:
        self.contexts = contexts
        self.text = array("i", tokens[-CONTEXT:])
        self.key = 0
        for token in self.text:
            self.key = _following(self.key, token)
        self.hits, self.misses = 1.0, 1.0
        self._find()

    def _find(self) -> None:
        """Look for the latest place with the same context."""
        found = self.contexts.past.get(self.key) or self.contexts.present.get(self.key)
        self.source, self.place = found or (NOTHING, 0)

    def draft(self, pace: Pace, most: int) -> Draft:
        """Return the tokens that followed there, if they are worth a try, and at most so many."""
        length = min(most, LONGEST, pace.worth(self.hits / (self.hits + self.misses)))
        return self.source[self.place : self.place + length]

    def write(self, tokens: Sequence[int]) -> None:
        """Add the tokens that were sampled."""
        for token in tokens:
            if len(self.text) >= CONTEXT:
                self.contexts.present[self.key] = (self.text, len(self.text))
            self.key = _following(self.key, token)
            self.text.append(token)
            if self.place < len(self.source):
                right = self.source[self.place] == token
                self.hits = FADING * self.hits + right
                self.misses = FADING * self.misses + (not right)
                self.place += 1
                if right:
                    continue
            self._find()
