"""The reference: the policy as it was when training began."""

import hashlib

import torch
from torch import Tensor, nn

from rlhf_pg.experience import Rollout
from rlhf_pg.models.adapters import adds_nothing, share_frozen
from rlhf_pg.models.policy import Policy


class Reference(nn.Module):
    """A frozen copy of a policy. It is copied from memory, never read again from a path or a hub,
    so it is the model that training really started from.

    Frozen weights are shared with the policy, so with LoRA it costs an adapter at most: a copy of
    the initial one, or none where that was fresh.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = share_frozen(policy).eval().requires_grad_(False)
        if adds_nothing(policy.model):
            self.policy.model = self.policy.model.unload()

    @torch.no_grad()
    def forward(self, batch: Rollout) -> Tensor:
        """Log-probabilities of the action tokens, (B,T)."""
        logprobs: Tensor = self.policy(batch).logprobs
        return logprobs

    def train(self, mode: bool = True) -> "Reference":
        """Stays in evaluation mode whatever is asked."""
        return super().train(False)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of the names and shapes of all tensors, and of the frozen parameters themselves.

    A resumed run must find the same: the saved weights fit then, and what was not saved is equal.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
