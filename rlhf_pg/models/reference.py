"""The reference: the policy as it was when training began."""

import copy
import hashlib

import torch
from torch import Tensor, nn

from rlhf_pg.experience import Rollout
from rlhf_pg.models.policy import Policy


class Reference(nn.Module):
    """A frozen copy of a policy. It is copied from memory, never read again from a path or a hub,
    so it is the model that training really started from.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, batch: Rollout) -> Tensor:
        """Log-probabilities of the action tokens, (B,T)."""
        logprobs: Tensor = self.policy(batch).logprobs
        return logprobs

    def train(self, mode: bool = True) -> "Reference":
        """Stays in evaluation mode whatever is asked."""
        return super().train(False)

    def fingerprint(self) -> str:
        """SHA-256 of the weights: a resumed run must have the same reference."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
