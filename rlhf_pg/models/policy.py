"""The policy: from a rollout to the log-probability and entropy of each of its actions."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.experience import Rollout
from rlhf_pg.masking import widen


class PolicyOutput(NamedTuple):
    """Per action token, (B,T), in at least float32; 0 in masked slots."""

    logprobs: Tensor  # of the sampled tokens
    entropy: Tensor  # of the distribution they were drawn from; detached


class Policy(nn.Module):
    """A causal language model that scores completions.

    Args:
        model: any `transformers` decoder.
        temperature: divides every logit, as it does in sampling.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: Rollout) -> PolicyOutput:
        """log pi(y_t | x, y_<t) and H(pi(. | x, y_<t)) for every action token of the batch."""
        width = batch.completion_ids.shape[1]
        mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
        output = self.model(
            input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
            attention_mask=mask,
            # Positions count real tokens, not columns: models with absolute positions notice.
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=width + 1,
        )
        # The logits in column t are about token t+1; those of the last column are about no token.
        logits = widen(output.logits[:, -width - 1 : -1]) / self.temperature
        everywhere = logits.log_softmax(dim=-1)
        logprobs = everywhere.gather(2, batch.completion_ids[:, :, None]).squeeze(2)
        return PolicyOutput(
            logprobs=torch.where(batch.action_mask, logprobs, 0.0),
            entropy=torch.where(batch.action_mask, _entropy(everywhere), 0.0),
        )


@torch.no_grad()
def _entropy(logprobs: Tensor) -> Tensor:
    """-sum p log p over the vocabulary, (B,T); a token of probability 0 adds 0."""
    p = logprobs.exp()
    return -torch.where(p > 0, p * logprobs, 0.0).sum(dim=-1)
