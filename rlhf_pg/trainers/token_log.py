"""Log of what an update says of each token.

Shapes: B rows on this rank, T completion width.
"""

import dataclasses
import math

import torch

from rlhf_pg.data.records import Experience
from rlhf_pg.models import PolicyOutput


class TokenLog:
    """Log-probability and entropy of each token in the latest update, (B,T); NaN elsewhere.

    An `Experience` that it watches carries the place of each row.
    """

    def __init__(self, experience: Experience) -> None:
        shape = experience.action_mask.shape
        self.logprobs = experience.sampler_logprobs.new_full(shape, math.nan)
        self.entropy = self.logprobs.clone()

    @staticmethod
    def placed(experience: Experience) -> Experience:
        """Return the experience with the place of each row, by which `note` knows it."""
        places = torch.arange(experience.num_rows, device=experience.groups.device)
        return dataclasses.replace(experience, places=places)

    def note(self, batch: Experience, new: PolicyOutput) -> None:
        """Take in what the policy says of a micro-batch."""
        if batch.places is None or not len(self.logprobs):
            return
        mask, width = batch.action_mask, batch.action_mask.shape[1]
        for whole, said in ((self.logprobs, new.logprobs), (self.entropy, new.entropy)):
            before = whole[batch.places, :width]
            whole[batch.places, :width] = torch.where(mask, said.detach().to(whole), before)
