"""The policy: from a rollout to the log-probability and entropy of each of its actions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.experience import Rollout
from rlhf_pg.masking import widen


class PolicyOutput(NamedTuple):
    """Per action token, (B,T), in at least float32; 0 in masked slots."""

    logprobs: Tensor  # of the sampled tokens
    entropy: Tensor  # of the distribution they were drawn from
    values: Tensor | None = None  # V of the state before each token, where there is a critic
    end_values: Tensor | None = None  # (B,) V of the state after the last action token


class Policy(nn.Module):
    """A causal language model that scores completions.

    Args:
        model: any `transformers` decoder, with adapters or without.
        temperature: divides every logit, as it does in sampling.
        entropy_gradient: the entropy is part of the loss; otherwise it is detached.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient

    def forward(self, batch: Rollout) -> PolicyOutput:
        """log pi(y_t | x, y_<t) and H(pi(. | x, y_<t)) for every action token of the batch."""
        return self.score(batch, self.run(batch))

    def run(self, batch: Rollout, **options: Any) -> Any:
        """The model's output, with the logits of the last T+1 columns."""
        columns = batch.completion_ids.shape[1] + 1
        return self.model(**model_inputs(batch), logits_to_keep=columns, **options)

    def score(self, batch: Rollout, output: Any) -> PolicyOutput:
        """What the logits in the output of `run` say of the completions.

        Where the sampler kept some tokens of a slot, S, and left out the others, this is all about
        the policy renormalised on them:

            pi_S(y) = pi(y) / sum_{v in S} pi(v)
        """
        columns = batch.completion_ids.shape[1] + 1
        # The logits in column t are about token t+1; those of the last column are about no token.
        logits = widen(output.logits[:, -columns:-1]) / self.temperature
        if batch.support_ids is not None:
            logits = _within(logits, batch.support_ids)
        everywhere = logits.log_softmax(dim=-1)
        logprobs = everywhere.gather(2, batch.completion_ids[:, :, None]).squeeze(2)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = torch.where(batch.action_mask, _entropy(everywhere), 0.0)
        return PolicyOutput(torch.where(batch.action_mask, logprobs, 0.0), entropy)


def model_inputs(batch: Rollout) -> dict[str, Any]:
    """Prompt and completion, side by side, as a `transformers` decoder takes them: (B,P+T)."""
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1).long()
    return {
        "input_ids": torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        "attention_mask": mask,
        # Positions count real tokens, not columns: models with absolute positions notice.
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "use_cache": False,
    }


def _within(logits: Tensor, support_ids: Tensor) -> Tensor:
    """The logits (B,T,V), -inf beyond the support of their slot; one without any keeps them all."""
    given = support_ids >= 0
    vocabulary = logits.shape[-1]
    # Padding is sent to a column of its own, behind the vocabulary.
    columns = torch.where(given, support_ids, vocabulary).long()
    kept = torch.zeros((*logits.shape[:-1], vocabulary + 1), dtype=torch.bool, device=logits.device)
    kept = kept.scatter(2, columns, True)[:, :, :-1] | ~given.any(dim=2, keepdim=True)
    return logits.masked_fill(~kept, -torch.inf)


def _entropy(logprobs: Tensor) -> Tensor:
    """-sum p log p over the vocabulary, (B,T); a token of probability 0 adds 0, gradient too."""
    p = logprobs.exp()
    return -(p * torch.where(p > 0, logprobs, 0.0)).sum(dim=-1)
