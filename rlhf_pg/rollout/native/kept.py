"""The state that an engine keeps on a GPU between sessions: graphs, and tensors they read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.models.attention import Heads, Layout
from rlhf_pg.rollout.engine import SamplingParams
from rlhf_pg.rollout.native.cuda_graphs import Graphs
from rlhf_pg.rollout.native.kv_cache import Stores
from rlhf_pg.rollout.native.slots import DecodeState
from rlhf_pg.rollout.native.unpadded_kv_cache import Unpadded


def forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | int = 0
) -> Tensor:
    """Return logits (N,V) of N tokens in a packed row, or of those to `keep`."""
    output = model(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids[None]),  # without it some models look for padding
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=keep,
        layout=layout,
    )
    logits: Tensor = output.logits[0]
    return logits


class Kept:
    """The state shared by all sessions with the same parameters.

    Its tensors, which steps read, stay where they are. Keys and values are freed at the end of a
    session, and weights may be copies made for it, so the next ones may have other addresses.
    Graphs are therefore kept with all addresses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        rows: int,
        eos_token_ids: Sequence[int],
        layers: Mapping[int, Heads] | None,
        run: Callable[..., Tensor],
    ) -> None:
        self.drawn = DecodeState(rows, params.max_tokens, model)
        self.eos = torch.tensor(list(eos_token_ids), device=model.device)
        self.stores = Unpadded(params.max_tokens, layers, model.device) if layers else None
        self.graphs, self.forward = Graphs(), run
        self._weights: tuple[int, ...] = ()

    def begin(self, cache_tokens: int) -> None:
        """Begin a session with room for this many tokens."""
        self.drawn.clear(0)
        if self.stores is not None:
            self.stores.begin(cache_tokens)
        self._weights = ()

    def run(
        self,
        step: Callable[[Any], Tensor | None],
        places: Any,
        model: PreTrainedModel,
        stores: Stores,
    ) -> Tensor | None:
        """Run a step, by a single launch if possible."""
        if not self._weights:
            self._weights = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))
        logits: Tensor | None = self.graphs(step, places, (self._weights, stores.lies()))
        return logits
