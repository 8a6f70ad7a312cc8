"""Splits of rows into batches: as many rows as a budget of tokens allows, in as few batches."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class RowLengths(NamedTuple):
    """The lengths of a completion and its prompt."""

    family: int  # shared by neighbours whose prompt, too, is the same
    prompt: int  # tokens
    completion: int
    actions: int = 0  # tokens of the completion that the policy chose


def split_packed(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches of row indices in which nothing is padded.

    A prompt is computed once for all rows of its family in a batch. A row that does not fit
    `max_tokens` by itself is a batch of its own; a family that does not fit is split.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    # First fit, the largest first: at most 11/9 of the batches that are needed (Johnson 1973).
    for size, own in sorted(_pieces(rows, max_tokens), key=lambda piece: -piece[0]):
        place = next((i for i, left in enumerate(room) if size <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place] += own
        room[place] -= size
    return batches


def split_padded(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches in which prompts, and completions, are padded to the longest."""
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].prompt - rows[i].completion):
        own = [rows[place] for place in (*batches[-1], i)]
        width = max(row.prompt for row in own) + max(row.completion for row in own)
        if len(own) > 1 and len(own) * width > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches if rows else []


def _pieces(rows: Sequence[RowLengths], max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield families, or parts of them, and their tokens; the longest completions come first."""
    for _, run in groupby(range(len(rows)), key=lambda i: rows[i].family):
        family = list(run)
        prompt = rows[family[0]].prompt
        size, piece = prompt, list[int]()
        for i in sorted(family, key=lambda i: -rows[i].completion):
            if piece and size + rows[i].completion > max_tokens:
                yield size, piece
                size, piece = prompt, []
            size += rows[i].completion
            piece.append(i)
        yield size, piece
