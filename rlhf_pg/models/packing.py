"""Layouts of a batch for a model: packed, with every prompt once and no padding, or padded.

Shapes: B rows, P prompt width, T completion width; N computed tokens; H hidden width.
"""

import math
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.data.batch import Batch, to_device
from rlhf_pg.models.attention import attention_support, configs_of, replaced_attention, window
from rlhf_pg.models.modes import evaluating
from rlhf_pg.models.shared_prefix import Family, SharedPrefix


class DecoderInput(NamedTuple):
    """The input of a `transformers` decoder for a batch, and where its states are in the output."""

    inputs: dict[str, Any]  # (rows, columns) each
    states: Tensor  # (B,T+1) indices among the N = rows * columns: before each token, and the last
    rows: Tensor  # (N,) how many rows with actions each token stands for


class Hidden(NamedTuple):
    """The output of a trunk for a batch."""

    hidden: Tensor  # (N,H) last hidden states
    states: Tensor  # as in `DecoderInput`
    rows: Tensor  # as in `DecoderInput`
    router_logits: tuple[Tensor, ...] = ()  # (N,E) per layer, if they are asked for


def hidden_states(trunk: nn.Module, batch: Batch, window: float, routes: bool = False) -> Hidden:
    """Run a trunk over a batch, packed within the `window`, with router logits for `routes`."""
    packs = can_pack(batch, window)
    tokens = lay_out_packed(batch) if packs else lay_out_padded(batch)
    asked = {"output_router_logits": True} if routes else {}
    with replaced_attention(configs_of(trunk)) if packs else nullcontext():
        output = trunk(**tokens.inputs, **asked, use_cache=False)
    logits = output.router_logits if routes else ()
    return Hidden(output.last_hidden_state.flatten(0, 1), tokens.states, tokens.rows, logits)


def can_pack(batch: Batch, window: float) -> bool:
    """Return whether a batch is packed."""
    return window == math.inf or batch.longest <= window


def packing_window(trunk: nn.Module, training: bool = False) -> float:
    """Return how long a packed row may be; 0 if attention has dropout or cannot be replaced."""
    if not isinstance(trunk, PreTrainedModel):
        return 0.0
    with evaluating(trunk):
        trunk.train(training)
        return window(trunk) if attention_support(trunk).unsupported_reason is None else 0.0


def lay_out_padded(batch: Batch) -> DecoderInput:
    """Lay prompts and completions side by side, (B,P+T)."""
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
    inputs = {
        "input_ids": torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        "attention_mask": mask,
        # Positions count real tokens, not columns: absolute positions make a difference.
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    rows, width = mask.shape
    columns = torch.arange(batch.prompt_ids.shape[1] - 1, width, device=mask.device)
    states = torch.arange(rows, device=mask.device)[:, None] * width + columns
    return DecoderInput(inputs, states, (mask * batch.action_mask.any(1, keepdim=True)).flatten())


def lay_out_packed(batch: Batch) -> DecoderInput:
    """Lay all real tokens one after another, (1,N), in the families of `SharedPrefix`.

    Their places are computed on the host and moved to the device in one piece.
    """
    rows = batch.counted().host_rows or ()
    device, width = batch.completion_ids.device, batch.prompt_ids.shape[1]
    prompt, completion = torch.tensor([(row.prompt, row.completion) for row in rows]).T
    family = torch.tensor([row.family for row in rows])
    first = torch.ones(len(rows), dtype=torch.bool)
    first[1:] = family[1:] != family[:-1]
    run = first.cumsum(0) - 1  # of its family
    columns = torch.arange(batch.width)
    there = (columns >= (width - prompt)[:, None]) & (columns < (width + completion)[:, None])
    kept = there & (first[:, None] | (columns >= width))
    # Padding gets the place of the last real token before it: any state will do there.
    places = (kept.flatten().cumsum(0) - 1).view_as(kept)
    prompt_end = places[first, width - 1][run]
    states = torch.cat([prompt_end[:, None], places[:, width:]], dim=1)
    positions = (there.cumsum(dim=1) - 1)[kept]
    sources = kept.flatten().nonzero().squeeze(1)
    acts = torch.tensor([int(row.actions > 0) for row in rows])
    shared = torch.zeros_like(run).scatter_add(0, run, acts)[run]
    shares = torch.where(columns < width, shared[:, None], acts[:, None])[kept]
    count = len(sources)
    together = to_device(torch.cat([sources, positions, shares, states.flatten()]), device)
    sources, positions, shares, flat = together.tensor_split([count, 2 * count, 3 * count])
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1).flatten()[sources]
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row.family)]
    families = [Family(run[0].prompt, [row.completion for row in run]) for run in runs]
    inputs = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids[None]),  # without it some models look for padding
        "position_ids": positions[None],
        "layout": SharedPrefix(families, device),
    }
    return DecoderInput(inputs, flat.view_as(states), shares)
