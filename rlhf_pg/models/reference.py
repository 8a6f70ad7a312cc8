"""The reference: the policy as it was when training began, or a copy that follows it slowly."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.adapters import adds_nothing, load_weights, share_frozen
from rlhf_pg.models.policy import Policy


class Reference(nn.Module):
    """A frozen copy of a policy; `moves` says whether it is going to `follow` the policy.

    It is copied from memory, never read again from a path or the Hub, so it is the model that
    training really started from. Frozen weights are shared with the policy, so with LoRA it costs
    an adapter at most: a copy of the initial one, or none if that was fresh and the reference does
    not move.
    """

    def __init__(self, policy: Policy, moves: bool = False) -> None:
        super().__init__()
        self.policy = share_frozen(policy).eval().requires_grad_(False)
        self.policy.balance = None  # its routers' choices do not matter
        self.moves = moves
        if adds_nothing(policy.model) and not moves:
            self.policy.model = self.policy.model.unload()

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the action tokens, (B,T)."""
        logprobs: Tensor = self.policy(batch).logprobs
        return logprobs

    @torch.no_grad()
    def follow(
        self,
        policy: Policy,
        alpha: float,
        gathered: Callable[..., AbstractContextManager[Any]] = lambda *_, write: nullcontext(),
    ) -> None:
        """Move towards the policy, in place (TR-DPO; Gorbatovski et al. 2024).

            ref <- alpha policy + (1 - alpha) ref

        Buffers move too. With `alpha` 1 the reference becomes an exact copy. With a small `alpha`
        at every step it is an exponential average, which bfloat16 rounds away once a move is below
        the last bit of a weight. For LoRA the factors A and B are averaged, not their product. TRL
        moves only the parameters and starts again from the initial model after a resume.

        `gathered(own, theirs, write=True)` is entered around each move, for tensors that can only
        be written together.
        """
        pairs = zip(policy.parameters(), self.policy.parameters(), strict=True)
        buffers = zip(policy.buffers(), self.policy.buffers(), strict=True)
        for theirs, own in (*pairs, *buffers):
            if own is theirs:  # frozen and shared
                continue
            with gathered(own, theirs, write=True):
                if own.is_floating_point():
                    own.lerp_(theirs, alpha)
                else:
                    own.copy_(theirs)

    def save(self, path: Path) -> None:
        """Save the weights or the adapter as `from_pretrained` reads them."""
        self.policy.model.save_pretrained(path)

    def restore(self, path: Path) -> None:
        """Load in place what `save` wrote."""
        load_weights(self.policy.model, path)

    def train(self, mode: bool = True) -> "Reference":
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)


def fingerprint(module: nn.Module) -> str:
    """Hash the names and shapes of all tensors, and the values of frozen parameters but those of a
    moving reference (SHA-256). A resumed run must find the same: what was not saved is then equal.
    """
    digest, stays = hashlib.sha256(), not (isinstance(module, Reference) and module.moves)
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if stays and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
