"""The load balance of a mixture of experts, and the auxiliary loss for it.

Shapes: L layers with a router, E experts, N computed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def has_experts(model: nn.Module) -> bool:
    """Return whether the model is a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


class Routed(NamedTuple):
    """Sums over the tokens of a batch, (L,E), which add up over micro-batches and processes."""

    chosen: Tensor  # tokens with the expert among their `top_k`; no gradient
    probability: Tensor  # of the expert, by the router's softmax


@dataclass(frozen=True)
class Balance:
    """The router auxiliary loss (Fedus et al. 2021, Switch Transformers, equations 4 to 6).

        1/L sum_l E sum_e f_le P_le

    where f_le is the share of the tokens that chose expert e in layer l, and P_le its mean
    probability. The loss is `top_k` where all experts are alike. `transformers` takes f and P over
    all layers together, which lets every layer have its own favourite.

    The tokens are those of all rows of an optimizer update, each prompt counted once per row. f has
    no gradient, so given the f of the whole update the loss is a sum over micro-batches.
    """

    top_k: int

    def routed(self, logits: Sequence[Tensor], rows: Tensor) -> Routed:
        """Sum what tokens chose.

        Args:
            logits: of each router, (N,E).
            rows: (N,), in how many rows each token stands.
        """
        layers = torch.stack([x.reshape(len(rows), -1) for x in logits])
        wide = torch.promote_types(layers.dtype, torch.float32)
        probability = layers.softmax(-1, dtype=wide)
        favourites = probability.detach().topk(self.top_k).indices
        chosen = torch.zeros_like(probability).scatter(-1, favourites, 1)
        weights = rows[:, None].to(wide)
        return Routed((chosen * weights).sum(1), (probability * weights).sum(1))

    def loss(self, chosen: Tensor, probability: Tensor) -> Tensor:
        """Return what the tokens of `probability` add to the loss, given all tokens' choices."""
        tokens = (chosen.sum(1, keepdim=True) / self.top_k).clamp(min=1)
        share = (chosen / tokens) * (probability / tokens)
        return chosen.shape[1] * share.sum(1).mean()


def balance_of(model: PreTrainedModel, has_trunk: bool = True) -> Balance:
    """Return the balance of a mixture of experts that `transformers` has an auxiliary loss for, and
    whose trunk computes hidden states and with them router logits; ValueError for any other model.
    """
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    top_k = getattr(bare.config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None or not has_trunk or getattr(bare, "router_aux_loss_coef", None) is None:
        raise ValueError(
            f"router_aux_loss_coef is for a mixture of experts with a loss for its routers, which "
            f"{type(bare).__name__} is not (DeepSeek's and GLM's are balanced by a bias): set it "
            "to 0"
        )
    return Balance(top_k)
