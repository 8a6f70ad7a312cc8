"""Layouts of a batch for a model, packed or padded.

A packed row has no padding. It holds trees of segments, each of which continues its parent and does
not see its siblings: a prompt with its completions, or with the branches of an agent's histories.

Shapes: B rows, P prompt width, T completion width; N computed tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from rlhf_pg.data.batch import Batch, pad_rows, to_device
from rlhf_pg.data.micro_batches import RowLengths
from rlhf_pg.models.attention import (
    AttentionSupport,
    attention_support,
    configs_of,
    replace_attention,
)
from rlhf_pg.models.lm_head import evaluating
from rlhf_pg.models.prefix_tree import PrefixTree
from rlhf_pg.models.recurrent import mix_rows


class DecoderInput(NamedTuple):
    """The input of a `transformers` decoder for a batch, and where its states are in the output."""

    inputs: dict[str, Any]  # (rows, columns) each
    states: Tensor  # (B,T+1) of the N tokens: the one that each follows, and the last action


class Hidden(NamedTuple):
    """The output of a trunk for a batch."""

    hidden: Tensor  # (N,width) last hidden states
    states: Tensor  # as in `DecoderInput`


def hidden_states(trunk: nn.Module, batch: Batch, window: float) -> Hidden:
    """Run a trunk over a batch, packed within the `window`."""
    if can_pack(batch, window):
        inputs, states = lay_out_packed(batch)
        with arranged(trunk, inputs["layout"]):
            output = trunk(**inputs, use_cache=False)
    else:
        inputs, states = lay_out_padded(batch)
        output = trunk(**inputs, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1)
    return Hidden(hidden, states)


@contextmanager
def arranged(model: nn.Module, layout: Any) -> Iterator[None]:
    """Let the attention and the mixers of a model follow a layout inside the block."""
    with replace_attention(configs_of(model)), mix_rows(model, layout):
        yield


def can_pack(batch: Batch, window: float) -> bool:
    """Return whether a batch is packed."""
    return window == math.inf or batch.longest <= window


def packing_window(trunk: nn.Module, training: bool = False) -> float:
    """Return the longest packed row; 0 if attention has dropout or cannot be replaced."""
    if not isinstance(trunk, PreTrainedModel):
        return 0.0
    with evaluating(trunk):
        if not training:
            return layout_support(trunk).window
        trunk.train()  # rows cannot be compared with dropout, whose rates are looked at
        return attention_support(trunk).window


def layout_support(model: PreTrainedModel) -> AttentionSupport:
    """Return the support for tokens in any layout, tried on rows that are packed and alone."""
    support = attention_support(model)
    if support.unsupported_reason is None and not _keeps_rows(model.base_model):
        return AttentionSupport("rows change one another when they are packed")
    return support


@torch.no_grad()
def _keeps_rows(trunk: Any) -> bool:
    """Compute two rows with a common prefix, packed and alone, and return whether they agree.

    True for weights without data, and in 16 bits: there rounding chooses other experts, and a
    resumed run might decide otherwise. A run whose rows disagree ends in step 1 (`Agreement`).
    """
    for parameter in trunk.parameters():
        has_no_data = parameter.is_meta or isinstance(parameter, FakeTensor)
        if has_no_data or parameter.element_size() < 4:
            return True
    segments = [
        (-1, 3),
        (0, 2),
        (0, 4),
    ]
    tree = PrefixTree(segments, trunk.device)
    tokens = torch.arange(1, 10, device=trunk.device)[None]
    tokens %= trunk.config.get_text_config().vocab_size
    with arranged(trunk, tree):
        output = trunk(
            input_ids=tokens,
            position_ids=tree.positions[None],
            attention_mask=torch.ones_like(tokens),
            layout=tree,
            use_cache=False,
        )
    packed = output[0][0]
    for span in tree.spans[1:]:
        row = [0, 1, 2, *range(span.start, span.stop)]
        output = trunk(input_ids=tokens[:, row], use_cache=False)
        alone = output[0][0]
        tolerance = 1e-3 * float(alone.abs().max())
        difference = (packed[row] - alone).abs().max()
        if not difference <= tolerance:
            return False
    return True


def lay_out_padded(batch: Batch) -> DecoderInput:
    """Lay prompts and completions side by side, (B,P+T), or each path of the trees in a row."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    mask = mask.long()
    indices = torch.arange(mask.numel(), device=mask.device)
    indices = indices.view_as(mask)
    if batch.parent_offsets is not None:
        sources, mask, indices = (to_device(x, mask.device) for x in _paths(batch))
        ids = ids.flatten()[sources]
    # Positions count real tokens, not columns, which matters for absolute positions.
    positions = mask.cumsum(dim=1) - 1
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions.clamp(min=0),
    }
    before = torch.arange(mask.numel(), device=mask.device) - 1
    states = _states(
        indices,
        before.clamp(min=0),
        batch.action_ends,
        batch.prompt_ids.shape[1],
    )
    return DecoderInput(inputs, states)


def _paths(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the paths of all trees as indices into flattened (B,P+T), right-padded, their mask,
    and the first index of each token on them, (B,P+T); on the host.
    """
    rows = batch.with_counts().host_rows or ()
    apart = [row._replace(family=i) for i, row in enumerate(rows)]
    segments = _segments(batch, apart)
    ways = list[list[int]]()  # from a root to the end of each segment
    for parent, length, source in segments:
        way = [] if parent < 0 else ways[parent]
        ways.append([*way, *range(source, source + length)])
    inner = {segment.parent for segment in segments}
    paths = [way for number, way in enumerate(ways) if number not in inner]
    sources, mask = pad_rows(paths, pad=paths[0][0])  # the first index of this token is 0 anyway
    indices = torch.zeros(len(rows) * batch.width, dtype=torch.int64)
    indices = indices.scatter_reduce(
        0,
        sources.flatten(),
        torch.arange(sources.numel()),
        "amin",
        include_self=False,
    )
    indices = indices.view(len(rows), -1)
    return sources, mask.long(), indices


def lay_out_packed(batch: Batch) -> DecoderInput:
    """Lay all real tokens one after another, (1,N), in the order of `PrefixTree`."""
    rows = batch.with_counts().host_rows or ()
    device = batch.completion_ids.device
    prompt = batch.prompt_ids.shape[1]
    segments = _segments(batch, rows)
    tree = PrefixTree([segment[:2] for segment in segments], device)
    facts = list[tuple[int, ...]]()
    for segment, span, first in zip(segments, tree.spans, tree.firsts, strict=True):
        before = tree.spans[segment.parent].stop - 1  # without a parent, any index would do
        fact = (
            span.start,
            before,
            segment.length,
            segment.source,
            first,
        )
        facts.append(fact)
    of_segments = torch.tensor(sorted(facts))
    of_tokens = of_segments.repeat_interleave(of_segments[:, 2], dim=0)
    starts, ends, _, sources, positions = of_tokens.T
    index = torch.arange(len(starts))
    inside = index - starts
    sources = sources + inside
    positions = positions + inside
    indices = torch.zeros(len(rows) * batch.width, dtype=torch.int64)
    indices = indices.scatter(0, sources, index)
    indices = indices.view(len(rows), -1)
    firsts = dict[int, int]()
    shared = [firsts.setdefault(row.family, i) for i, row in enumerate(rows)]
    indices[:, prompt - 1] = indices[shared, prompt - 1]
    states = _states(
        indices,
        torch.where(inside == 0, ends, index - 1),
        torch.tensor([row.end for row in rows]),
        prompt,
    )
    together = torch.cat([sources, positions, states.flatten()])
    together = to_device(together, device)
    sources, positions, flat = together.tensor_split([len(index), 2 * len(index)])
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    ids = ids.flatten()[sources][None]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),  # without it some models infer padding
        "position_ids": positions[None],
        "layout": tree,
    }
    return DecoderInput(inputs, flat.view_as(states))


def _states(
    indices: Tensor,
    before: Tensor,
    ends: Tensor,
    prompt: int,
) -> Tensor:
    """Return `DecoderInput.states`, given the index of each token (B,P+T), the index that each of
    the N computed tokens follows, `Batch.action_ends`, and P.
    """
    columns = ends[:, None] + (prompt - 1)
    last = indices.gather(1, columns)
    followed = before[indices[:, prompt:]]
    return torch.cat([followed, last], dim=1)


_Cell = tuple[int, int]  # row and column of a token


class Segment(NamedTuple):
    """Neighbouring tokens of a row, each of which follows the one before."""

    parent: int  # number of the segment whose end it follows, lower than its own; -1 for none
    length: int
    source: int  # index of its first token in flattened (B,P+T)


def _segments(batch: Batch, rows: Sequence[RowLengths]) -> list[Segment]:
    """Cut rows at every branch, in order of creation; the prompt of a family is in its first row,
    and a segment of its own if the family has several rows.
    """
    sizes = Counter(row.family for row in rows)
    firsts = dict[int, int]()
    # The first token of each segment, and the token that it follows.
    follows = dict[_Cell, _Cell | None]()
    for i, row in enumerate(rows):
        first = firsts.setdefault(row.family, i)
        if first == i:
            follows[i, -row.prompt] = None
        jumps = dict(row.jumps)
        if row.completion and sizes[row.family] > 1:
            jumps = {0: 1} | jumps
        for column, offset in jumps.items():
            follows[i, column] = None
            if offset:
                before = i if offset <= column else first
                end = column - offset
                follows[i, column] = before, end
                if end + 1 < rows[before].completion:
                    follows.setdefault((before, end + 1), (before, end))
    segments = list[Segment]()
    numbers: dict[_Cell | None, int] = {None: -1}  # of the segments that end there
    prompt = batch.prompt_ids.shape[1]
    starts = [*sorted(follows), (-1, 0)]
    for (i, column), (row_after, after) in pairwise(starts):
        stop = after if row_after == i else rows[i].completion
        parent = numbers[follows[i, column]]
        numbers[i, stop - 1] = len(segments)
        source = i * batch.width + prompt + column
        segments.append(Segment(parent, stop - column, source))
    return segments
