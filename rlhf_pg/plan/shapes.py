"""The numbers of a dense decoder's shape that its seconds depend on."""

from typing import Any, NamedTuple

from torch import nn


class Shape(NamedTuple):
    """The shape of a decoder whose layers are attention and an MLP."""

    layers: int
    hidden: int
    attention: int  # query heads times their width
    keys: int  # key-value heads times their width
    inner: int  # width of the MLP
    vocabulary: int
    body: float  # parameters of the layers
    tied: bool = False  # the head is the embedding

    @property
    def head(self) -> float:
        """The number of parameters of the head."""
        return float(self.vocabulary * self.hidden)

    @property
    def read(self) -> float:
        """The number of parameters that a token passes through: all but the embedding."""
        return self.body + self.head

    @property
    def parameters(self) -> float:
        """The number of all parameters; a tied embedding and head count once."""
        return self.read + (0 if self.tied else self.head)

    @property
    def cached(self) -> float:
        """The bytes of keys and values of a token, in bfloat16."""
        return 2 * 2.0 * self.layers * self.keys


def shape_of(model: nn.Module) -> Shape:
    """Return the shape of a model, whose tensors may be without data; adapters count as layers.

    Args:
        model: a model of transformers, with or without adapters.
    """
    part: Any = model
    config = part.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    ends = {id(p): p for p in part.get_input_embeddings().parameters()}
    ends |= {id(p): p for p in part.get_output_embeddings().parameters()}
    matrices = [p for p in ends.values() if p.ndim == 2]
    body = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in matrices)
    sizes = (heads * width, keys * width, inner, config.vocab_size, float(body))
    return Shape(config.num_hidden_layers, hidden, *sizes, tied=len(matrices) == 1)
