"""How a batch goes through a model: every prompt once, and without padding, where the model allows.

Shapes: B rows, P prompt width, T completion width; N tokens that are computed; H hidden width.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.data.micro_batches import RowLengths
from rlhf_pg.data.records import Rollout, to_device
from rlhf_pg.models.attention import attention_support, configs_of, replaced_attention, window
from rlhf_pg.models.modes import evaluating
from rlhf_pg.models.shared_prefix import Family, SharedPrefix


class Tokens(NamedTuple):
    """A batch as a `transformers` decoder takes it, and where its states are in what comes out."""

    inputs: dict[str, Any]  # (rows, columns) each
    states: Tensor  # (B,T+1) of the N = rows * columns: the one before each token, and the last
    rows: Tensor  # (N,) how many rows with actions each stands for


class Hidden(NamedTuple):
    """What comes out."""

    hidden: Tensor  # (N,H) last hidden states
    states: Tensor  # as in `Tokens`
    rows: Tensor  # likewise
    router_logits: tuple[Tensor, ...] = ()  # (N,E) per layer, where they are asked for


def hidden_states(trunk: nn.Module, batch: Rollout, window: float, routes: bool = False) -> Hidden:
    """What a trunk makes of a batch.

    Args:
        window: of `packing_window`; what is longer is padded.
        routes: ask for the logits of routers.
    """
    packs = can_pack(batch, window)
    tokens = lay_out_packed(batch) if packs else lay_out_padded(batch)
    asked = {"output_router_logits": True} if routes else {}
    with replaced_attention(configs_of(trunk)) if packs else nullcontext():
        output = trunk(**tokens.inputs, **asked, use_cache=False)
    logits = output.router_logits if routes else ()
    return Hidden(output.last_hidden_state.flatten(0, 1), tokens.states, tokens.rows, logits)


def can_pack(batch: Rollout, window: float) -> bool:
    """Whether a batch is packed."""
    return window == math.inf or batch.longest <= window


def packing_window(trunk: nn.Module, training: bool = False) -> float:
    """Tokens of a row up to which the trunk may be given packed rows: 0 where its attention cannot
    be replaced, or in training where that has dropout.
    """
    if not isinstance(trunk, PreTrainedModel):
        return 0.0
    with evaluating(trunk):
        trunk.train(training)
        return window(trunk) if attention_support(trunk).unsupported_reason is None else 0.0


def lay_out_padded(batch: Rollout) -> Tokens:
    """Prompt and completion side by side, (B,P+T)."""
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
    inputs = {
        "input_ids": torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        "attention_mask": mask,
        # Positions count real tokens, not columns: models with absolute positions notice.
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    rows, width = mask.shape
    columns = torch.arange(batch.prompt_ids.shape[1] - 1, width, device=mask.device)
    states = torch.arange(rows, device=mask.device)[:, None] * width + columns
    return Tokens(inputs, states, (mask * batch.action_mask.any(1, keepdim=True)).flatten())


def lay_out_packed(batch: Rollout) -> Tokens:
    """All real tokens one after another, (1,N): families, see `rlhf_pg.models.shared_prefix`.

    Where they are is worked out on the host, and handed to the device in one piece.
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
    # In padding this is the last token before: any state will do there.
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
    inputs = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids[None]),  # or some models look for padding first
        "position_ids": positions[None],
        "layout": SharedPrefix(_families(rows), device),
    }
    return Tokens(inputs, flat.view_as(states), shares)


def _families(rows: Sequence[RowLengths]) -> list[Family]:
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row.family)]
    return [Family(run[0].prompt, [row.completion for row in run]) for run in runs]
