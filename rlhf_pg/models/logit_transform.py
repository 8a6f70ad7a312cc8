"""The step between a model's head and its logits: nothing, a scale, or a soft cap."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.models.adapters import LOADED, trunk
from rlhf_pg.models.modes import evaluating


@dataclass(frozen=True)
class LogitTransform:
    """A function that a model applies to the output x of its head: s x, or c tanh(s x / c)."""

    scale: float = 1.0  # s
    cap: float | None = None  # c

    def __call__(self, x: Tensor) -> Tensor:
        """Return the model's logits."""
        scaled = x * self.scale
        return scaled if self.cap is None else self.cap * (scaled / self.cap).tanh()


NOTHING = LogitTransform()


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """Return the head of the model below any adapter; it may itself be adapted."""
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    layer: nn.Module | None = bare.get_output_embeddings()
    return layer


@torch.no_grad()
def logit_transform_of(model: nn.Module) -> LogitTransform | None:
    """Measure what the model does after its head, by replacing the head's output by known numbers.

    It runs the model, so call it while the weights are whole. None if `ChunkedLMHead` cannot
    replace what follows the trunk: the module is of another kind, its head reads something other
    than the trunk's last hidden states, or it does more after the head.
    """
    layer = output_layer(model) if isinstance(model, LOADED) else None
    # A model that does not name its trunk, such as Llama4ForCausalLM, claims to be all trunk.
    if layer is None or layer in trunk(model).modules():
        return None
    if next(model.parameters()).is_meta:  # without data there is nothing to measure
        return NOTHING
    read: list[Any] = []
    shown: list[Tensor] = []

    def exchange(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        read.extend(inputs[:1])
        shown.append(_probe(output))
        return shown[-1]

    ids = torch.tensor([[0, 1, 2]], device=next(model.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with evaluating(model):
        hidden = trunk(model)(**inputs).last_hidden_state
        hook = layer.register_forward_hook(exchange)
        try:
            made = model(**inputs).logits
        finally:
            hook.remove()
    if len(shown) != 1 or len(read) != 1 or not torch.equal(read[0], hidden):
        return None
    x, made = shown[0], made.double()
    if made.shape != x.shape:
        return None
    scale, limit = float(made[0, 0, 0] / x[0, 0, 0]), float(made[0, 0, 1])
    transform = LogitTransform(scale, limit if abs(limit) < 2.0**50 else None)
    return transform if torch.allclose(transform(x), made, rtol=1e-6, atol=0) else None


def _probe(output: Tensor) -> Tensor:
    """Return numbers to put in place of the head's output that no dtype rounds."""
    x = (torch.arange(output.numel(), dtype=torch.float64) * 7 % 129 - 64).reshape(output.shape)
    x[..., 0], x[..., 1] = 2.0**-20, 2.0**100  # where tanh is linear, and where it is flat
    return x.to(output.device)
