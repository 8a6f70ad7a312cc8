"""Micro-batches: which rows go together through a model, within a budget of tokens."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

Jumps = tuple[tuple[int, int], ...]


class RowLengths(NamedTuple):
    """The lengths of a completion and its prompt."""

    family: int  # shared by neighbours with the same group and prompt
    prompt: int  # tokens
    completion: int
    predicted: int = 0  # tokens of the completion whose log-probabilities are computed
    end: int = 0  # columns of the completion through its last action token
    jumps: Jumps = ()  # (column, offset) of a tree's branches; see `Batch`
    deepest: int = 0  # tokens of a tree's longest path; 0 for a sequence
    paths: int = 1  # from a root to a leaf

    @property
    def longest(self) -> int:
        """The tokens of the longest path, prompt included."""
        return self.deepest or self.prompt + self.completion


def measure_tree(prompt: int, offsets: Sequence[int]) -> tuple[Jumps, int, int]:
    """Return `jumps`, `deepest` and `paths` of a row, given its prompt's length and offsets."""
    jumps = tuple((t, offset) for t, offset in enumerate(offsets) if offset != 1)
    if not jumps:
        return (), 0, 1
    followed = {*range(prompt - 1)}
    followed |= {t - offset for t, offset in enumerate(offsets, prompt) if offset}
    depths = [*range(1, prompt + 1)]
    for offset in offsets:
        depth = depths[-offset] if offset else 0
        depths.append(depth + 1)
    leaves = len(depths) - len(followed)
    return jumps, max(depths), leaves


def split_packed(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches of row indices without padding.

    A prompt is computed once for all rows of its family in a batch. A row that does not fit
    `max_tokens` alone is a batch of its own; a family that does not fit is split.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    # First-fit decreasing: at most 11/9 of the minimal number of batches (Johnson 1973).
    pieces = sorted(_pieces(rows, max_tokens), key=lambda piece: -piece[0])
    for size, piece in pieces:
        index = next(
            (i for i, left in enumerate(room) if size <= left),
            len(room),
        )
        if index == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[index] += piece
        room[index] -= size
    return batches


def split_padded(rows: Sequence[RowLengths], max_tokens: int) -> list[list[int]]:
    """Split rows into batches that are padded to the longest prompt and completion."""
    batches: list[list[int]] = []
    prompt = completion = paths = 0  # the longest of the last batch, and its number of paths
    longest_first = sorted(range(len(rows)), key=lambda i: -rows[i].longest)
    for i in longest_first:
        row = rows[i]
        depth = row.longest - row.prompt
        prompt = max(prompt, row.prompt)
        completion = max(completion, depth)
        paths += row.paths
        if not batches or paths * (prompt + completion) > max_tokens:
            batches.append([])
            prompt = row.prompt
            completion = depth
            paths = row.paths
        batches[-1].append(i)
    return batches


def _pieces(rows: Sequence[RowLengths], max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield families, or parts of them, with their tokens; longest completions first."""
    families = groupby(range(len(rows)), key=lambda i: rows[i].family)
    for _, run in families:
        family = list(run)
        prompt = rows[family[0]].prompt
        size = prompt
        piece = list[int]()
        family.sort(key=lambda i: -rows[i].completion)
        for i in family:
            length = rows[i].completion
            if piece and size + length > max_tokens:
                yield size, piece
                size = prompt
                piece = []
            size += length
            piece.append(i)
        yield size, piece
