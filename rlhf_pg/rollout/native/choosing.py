"""The choice of tokens from logits, one per row or as many as a draft has right.

Shapes: R rows, N tokens of a pass, V ids.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_pg.rollout.engine import SamplingParams
from rlhf_pg.rollout.native.close_draws import Head, close_draws
from rlhf_pg.rollout.native.decode_attention import KeyValues, Prefill
from rlhf_pg.rollout.native.slots import DecodeState, Row
from rlhf_pg.rollout.token_sampling import (
    Drawn,
    draw,
    ids_of,
    support_mask,
    uniform_at,
)


class Chooser:
    """Draws tokens with the noise of their places.

    Args:
        state: receives the tokens.
        eos: the ids that end a row.
        forward: the model's forward pass, for the rows in which rounding decides. They are computed
            again, alone, so that what is drawn depends neither on what is computed beside a row nor
            on drafts. None: whatever rounding says.
        head: the model's output layer.
    """

    def __init__(
        self,
        state: DecodeState,
        params: SamplingParams,
        eos: Tensor,
        forward: Callable[..., Tensor] | None,
        head: Head | None = None,
    ) -> None:
        self.state, self.params = state, params
        self.eos, self.forward, self.head = eos, forward, head

    def pick(self, slots: slice | Tensor, columns: Tensor, logits: Tensor) -> Drawn:
        """Draw from logits (N,V) of tokens in these slots and columns."""
        noise = uniform_at(self.state.keys[slots], self.state.first[slots] + columns)
        return draw(logits, self.params, noise)

    def choose(self, start: int, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Draw the next token of each of the rows from slot `start` on, and return all, (R,).

        Logits (R,V) of close draws are replaced by those of the row alone.
        """
        slots = slice(start, start + len(logits))
        columns = self.state.lengths[slots]
        drawn = self.pick(slots, columns, logits)
        if self.forward is not None:
            close = close_draws(logits, self.params, drawn, self.head).nonzero().flatten().tolist()
            for i in close:
                logits[i] = self._alone(rows[i], start + i, [])
            drawn = self.pick(slots, columns, logits) if close else drawn
        self.state.append(slots, drawn.ids, drawn.logprobs, self.eos)
        return drawn.ids

    def verify(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[int]],
        logits: Tensor,
        slots: Tensor,
        columns: Tensor,
    ) -> list[list[int]]:
        """Draw the tokens after each row's newest one, as far as its draft agrees, and one more.

        Args:
            drafts: of each row.
            logits: (N,V) after the newest token and the draft of each row in turn.
            slots, columns: (N,) of the tokens to draw.

        Returns:
            The new tokens of each row.
        """
        drawn, ends = self.pick(slots, columns, logits), self.eos.tolist()
        ids, found, kept = drawn.ids.tolist(), [], []
        close = [False] * len(ids)
        if self.forward is not None:
            close = close_draws(logits, self.params, drawn, self.head).tolist()
        place = 0
        for slot, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            new: list[int] = []
            for i, guess in enumerate([*draft, None], place):
                if close[i]:
                    logits[i] = self._alone(row, slot, new)
                    at = slice(i, i + 1)
                    again = self.pick(slots[at], columns[at], logits[at])
                    ids[i], drawn.logprobs[i] = int(again.ids), again.logprobs[0]
                new.append(ids[i])
                kept.append(i)
                if ids[i] != guess or guess in ends:
                    break
            found.append(new)
            place += 1 + len(draft)
        index = torch.tensor(kept)
        tokens = torch.tensor([token for new in found for token in new])
        self.state.extend(slots[index], columns[index], tokens, drawn.logprobs[index], self.eos)
        self.note_support(
            [row for row, new in zip(rows, found, strict=True) for _ in new], logits[index]
        )
        return found

    def note_support(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Keep the tokens that were drawn from, if not all; this waits for a GPU at every token."""
        if self.params.truncates:
            for row, support in zip(rows, ids_of(support_mask(logits, self.params)), strict=True):
                row.support.append(support)

    def _alone(self, row: Row, slot: int, new: Sequence[int]) -> Tensor:
        """Return the logits (V,) after a row and its `new` tokens, from a pass of its own."""
        assert self.forward is not None
        written = self.state.tokens[slot, : row.length]
        tokens = torch.cat([torch.tensor([*row.prompt.request.tokens]), written, torch.tensor(new)])
        count = len(tokens)
        store = KeyValues(0, count)
        store.reserve(1, count)
        last = torch.tensor([count - 1])
        return self.forward(tokens.long(), torch.arange(count), Prefill(store, [0], [count]), last)[
            0
        ]
