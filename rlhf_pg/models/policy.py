"""The policy, which computes the log-probability and entropy of each action of a rollout."""

from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.adapters import trunk
from rlhf_pg.models.experts import Routed, balance_of
from rlhf_pg.models.lm_head import CHUNK_SIZE, ChunkedLMHead, num_chunks
from rlhf_pg.models.logit_transform import logit_transform_of
from rlhf_pg.models.modes import train_as_evaluated
from rlhf_pg.models.packing import Hidden, hidden_states, lay_out_padded, packing_window
from rlhf_pg.models.softmax import token_scores


class PolicyOutput(NamedTuple):
    """Scores of the action tokens, (B,T), in at least float32; 0 in masked slots."""

    logprobs: Tensor  # of the sampled tokens
    entropy: Tensor  # of the distribution they were drawn from
    values: Tensor | None = None  # V of the state before each token, where there is a critic
    end_values: Tensor | None = None  # (B,) V of the state after the last action token
    routed: Routed | None = None  # of all tokens, if the loss asks for it


class Policy(nn.Module):
    """A causal language model that scores completions.

    Args:
        model: any `transformers` decoder, with adapters or without.
        temperature: divides every logit, as it does in sampling.
        entropy_gradient: whether the entropy is part of the loss; otherwise it is detached.
        most_tokens: of a batch, on any process.
        chunk_size: logits that may live at a time, the same on every process (`chunk_size_for`).
        balanced: whether the loss of the routers of a mixture of experts is part of the loss;
            ValueError if the model has none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        most_tokens: int = 1,
        chunk_size: int = CHUNK_SIZE,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.chunk_size = chunk_size
        self.head: ChunkedLMHead | None = None
        self.drops = False  # in training
        self.window = 0.0  # longest row, in tokens, that is packed
        transform = logit_transform_of(model)
        if transform is not None:
            chunks = num_chunks(most_tokens, model.config.get_text_config().vocab_size, chunk_size)
            self.head = ChunkedLMHead(model, temperature, entropy_gradient, chunks, transform)
            self.window = packing_window(trunk(model))
        self.balance = balance_of(model, self.head is not None) if balanced else None

    def train(self, mode: bool = True) -> Self:
        """Switch train mode; without dropout the model trains as it is evaluated."""
        super().train(mode)
        if mode and not self.drops:
            train_as_evaluated(self.model)
        return self

    def keep_dropout(self) -> None:
        """Train with dropout, unpacked if the attention has dropout, which ours lacks."""
        self.drops = True
        self.window = self.window and packing_window(trunk(self.model), training=True)

    def forward(self, batch: Batch, routes_alone: bool = False) -> Any:
        """Return log pi(y_t | x, y_<t) and H(pi(. | x, y_<t)) for every action token of the batch,
        or only what the routers chose, (L,E).
        """
        if routes_alone:
            routed = self._routed(self.hidden_states(batch))
            assert routed is not None
            return routed.chosen
        if self.head is not None:
            return self.score(batch, self.hidden_states(batch))
        slots = batch.action_slots()
        logits = self.logits(batch).flatten(0, 1)[slots]
        tokens = batch.completion_ids.flatten()[slots]
        scores = token_scores(logits, tokens, self.temperature, self.entropy_gradient)
        return _spread(batch, slots, *scores)

    def hidden_states(self, batch: Batch) -> Hidden:
        """Run the trunk over a batch, as in `rlhf_pg.models.packing`."""
        return hidden_states(trunk(self.model), batch, self.window, self.balance is not None)

    def score(self, batch: Batch, trunk: Hidden) -> PolicyOutput:
        """Apply the head to the completions, given the `hidden_states` of the batch."""
        assert self.head is not None
        slots = batch.action_slots()
        # By an index in brackets, the threads of a CPU would add up the gradient in any order.
        before = trunk.hidden.index_select(0, trunk.states[:, :-1].flatten()[slots])
        scored = _spread(batch, slots, *self.head(before, batch.completion_ids.flatten()[slots]))
        return scored._replace(routed=self._routed(trunk))

    def _routed(self, trunk: Hidden) -> Routed | None:
        if self.balance is None:
            return None
        return self.balance.routed(trunk.router_logits, trunk.rows)

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of all tokens of the completions, (B,T,V), as the model gives them."""
        columns = batch.completion_ids.shape[1] + 1
        inputs = lay_out_padded(batch).inputs
        output = self.model(**inputs, use_cache=False, logits_to_keep=columns)
        # The logits in column t are about token t+1; those of the last column are about no token.
        logits: Tensor = output.logits[:, -columns:-1]
        return logits


def _spread(batch: Batch, slots: Tensor, *numbers: Tensor) -> PolicyOutput:
    """Put numbers of the action tokens into their slots, with 0 elsewhere; (B,T) each."""
    mask = batch.action_mask
    spread = [x.new_zeros(mask.numel()).scatter(0, slots, x).view(mask.shape) for x in numbers]
    logprobs, entropy = spread
    return PolicyOutput(logprobs, entropy)
