"""SplitMix64 (Steele et al. 2014) on tensors of int64, whose arithmetic wraps around.

Noise is a pure function of its coordinates, which are mixed in one after another.
"""

from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """One step of it: each of the 64 bits depends on every bit of `x`."""
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63
