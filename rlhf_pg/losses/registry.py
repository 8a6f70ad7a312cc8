"""The policy losses that a config chooses by the key `policy_loss`.

To add one, write a function and give it a line here. Its parameters beyond the first four are
config keys of the same name (except `groups` of `p3o`, which comes from the batch).
"""

from collections.abc import Callable

from rlhf_pg.losses.clipped import cispo, clipped_surrogate, gmpo, p3o, sapo
from rlhf_pg.losses.ratio import Loss
from rlhf_pg.losses.unclipped import kl_penalty, mdpo, surrogate, vanilla

POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "surrogate": surrogate,
    "kl_penalty": kl_penalty,
    "mdpo": mdpo,
    "clipped_surrogate": clipped_surrogate,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "p3o": p3o,
}
