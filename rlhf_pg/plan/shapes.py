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


def gated(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    inner: int,
    vocabulary: int,
    tied: bool = False,
    width: int = 128,
) -> Shape:
    """Return the shape of a Llama or Qwen, whose MLP has three matrices; norms and biases do not
    count.

    Args:
        heads: numbers of query heads, and of key-value heads.
        width: width of a head.
    """
    attention, keys = (n * width for n in heads)
    body = layers * hidden * (2 * attention + 2 * keys + 3 * inner)
    return Shape(layers, hidden, attention, keys, inner, vocabulary, float(body), tied)


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


# As the configs of the Hub have them.
SHAPES = {
    "Qwen2.5-0.5B": gated(24, 896, (14, 2), 4864, 151_936, tied=True, width=64),
    "Qwen3-0.6B": gated(28, 1024, (16, 8), 3072, 151_936, tied=True),
    "Qwen2.5-1.5B": gated(28, 1536, (12, 2), 8960, 151_936, tied=True),
    "Qwen3-4B": gated(36, 2560, (32, 8), 9728, 151_936, tied=True),
    "Qwen2.5-7B": gated(28, 3584, (28, 4), 18944, 152_064),
    "Llama-3-8B": gated(32, 4096, (32, 8), 14336, 128_256),
    "Llama-2-13B": gated(40, 5120, (40, 40), 13824, 32_000),
    "Qwen2.5-14B": gated(48, 5120, (40, 8), 13824, 152_064),
    "Qwen2.5-32B": gated(64, 5120, (40, 8), 27648, 152_064),
    "Qwen3-32B": gated(64, 5120, (64, 8), 25600, 151_936),
    "Llama-3-70B": gated(80, 8192, (64, 8), 28672, 128_256),
    "Qwen2.5-72B": gated(80, 8192, (64, 8), 29568, 152_064),
}
