"""The policy losses that a config chooses by the key `policy_loss`.

To add one, write a function and give it a line here. Its parameters beyond the first four are
config keys of the same name.
"""

from collections.abc import Callable

from rlhf_pg.losses.clipped import cispo, clipped_surrogate, sapo
from rlhf_pg.losses.ratio import Loss
from rlhf_pg.losses.unclipped import kl_penalty, surrogate, vanilla

POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "surrogate": surrogate,
    "kl_penalty": kl_penalty,
    "clipped_surrogate": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
}
