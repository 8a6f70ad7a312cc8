"""The objective of an update: a sum of terms, each a loss per token over tokens of its own.

    L = sum over terms k, tokens t of  coef_k w_kt loss_kt

w_k are the weights of the term's aggregation (`rlhf_pg.losses.token_weights`). Their denominators
are counted over the whole update and all processes, so how rows are split into micro-batches
changes no gradient.

Shapes: B rows on this rank, T completion width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.data import Batch, Row
from rlhf_pg.data.prompts import permutation
from rlhf_pg.losses import Loss, nll, token_weights, weight_count
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.report.metrics import Meter
from rlhf_pg.runtime import Runtime

Tokens = Callable[[Batch], Tensor]  # (B,T) bool
LossFunction = Callable[[Any, Batch], Loss]  # of what the module returns


def action_tokens(batch: Batch) -> Tensor:
    """Return the tokens that the policy chose and is trained on."""
    return batch.action_mask


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of the objective.

        Term(name="entropy", loss=entropy, coef=-0.01, entropy_gradient=True)

    Attributes:
        loss: given the module's output and the batch, returns the loss of every token, (B,T), and
            numbers (B,T) or (B,) by name, whose means over the tokens, or the rows that have some,
            are logged; the names are the same on all processes. In other slots the loss is finite.
        tokens: selects the tokens (B,T) of the term, in any rows.
        coef: a number, or a function that returns the current number.
        aggregation: `token_mean`, `sequence_mean` or `constant`; None: as the key `aggregation`.
        rows: given the step and the update, both from 0, returns rows that every update gets for
            this term. They have no action tokens, so that other terms leave them out.
        entropy_gradient: True if the loss depends on `new.entropy`, which is detached otherwise.
    """

    name: str
    loss: LossFunction
    tokens: Tokens = action_tokens
    coef: Callable[[], float] | float = 1.0
    aggregation: str | None = None
    rows: Callable[[int, int], Batch] | None = None
    entropy_gradient: bool = False


class Objective:
    """The sum of some terms; a term replaces an earlier one of the same name.

    Terms over the same tokens with the same aggregation are added per token before they are
    weighted.

    Args:
        aggregation, max_completion_length: as the config says.
        all_sum: sums a number over all processes.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        aggregation: str,
        max_completion_length: int,
        all_sum: Callable[[Tensor], Tensor],
    ) -> None:
        self.terms = {term.name: term for term in terms}
        self.max_completion_length = max_completion_length
        self.all_sum = all_sum
        self.groups: dict[tuple[Tokens, str], list[Term]] = {}
        self.logged_by = dict.fromkeys(("loss", "entropy"), "the learner")  # by metric
        for term in self.terms.values():
            key = term.tokens, term.aggregation or aggregation
            self.groups.setdefault(key, []).append(term)

    def with_rows(self, minibatch: Batch, step: int, update: int) -> Batch:
        """Append the rows that the terms add to an update."""
        added = [term.rows(step, update) for term in self.terms.values() if term.rows]
        return Batch.concat([minibatch, *added]) if added else minibatch

    def counts(self, minibatch: Batch) -> list[Tensor]:
        """Count the tokens or rows of each group of terms, over the update; collective."""
        return [
            self.all_sum(weight_count(tokens(minibatch), aggregation))
            for tokens, aggregation in self.groups
        ]

    def predict(self, minibatch: Batch) -> Batch:
        """Mark the tokens of all terms as `predicted`, beside the action tokens."""
        masks = [tokens(minibatch) for tokens, _ in self.groups if tokens is not action_tokens]
        if not masks:
            return minibatch
        predicted = torch.stack([minibatch.action_mask, *masks]).any(0)
        return minibatch.with_columns(predicted=predicted)

    def __call__(
        self,
        new: Any,
        batch: Batch,
        counts: Sequence[Tensor],
        meter: Meter,
    ) -> Tensor:
        """Compute this micro-batch's share of the objective, given the `counts` of the update."""
        shares = []
        for (tokens, aggregation), count in zip(self.groups, counts, strict=True):
            mask = tokens(batch)
            losses = []
            for term in self.groups[tokens, aggregation]:
                loss, metrics = term.loss(new, batch)
                coef = term.coef() if callable(term.coef) else term.coef
                losses.append(coef * loss)
                for name, numbers in metrics.items():
                    if self.logged_by.setdefault(name, term.name) != term.name:
                        raise ValueError(
                            f"term {term.name!r} logs {name!r}, as {self.logged_by[name]} does: "
                            "rename it"
                        )
                    meter.add_masked(name, numbers, mask)
            per_token = sum(losses[1:], losses[0])
            weights = token_weights(
                mask,
                aggregation,
                self.max_completion_length,
                count,
                per_token.dtype,
            )
            shares.append((per_token * weights).sum())
        return sum(shares[1:], shares[0])


# ---------------------------------------------------------------------------------- general terms


def entropy(new: PolicyOutput, batch: Batch) -> Loss:
    """Return the entropy H_t, which a negative coefficient raises."""
    return new.entropy, {}


def likelihood(name: str, tokens: Tokens, coef: float, **options: Any) -> Term:
    """Make a term of the negative log-likelihood of some tokens (`rlhf_pg.losses.nll`), averaged
    over them and logged by its name.
    """

    def loss(new: PolicyOutput, batch: Batch) -> Loss:
        per_token = nll(new.logprobs, tokens(batch))
        return per_token, {name: per_token}

    return Term(
        name=name,
        loss=loss,
        tokens=tokens,
        coef=coef,
        aggregation="token_mean",
        **options,
    )


def text_tokens(batch: Batch) -> Tensor:
    """Return the tokens of rows that a term has added."""
    return batch.completion_mask & (batch.groups < 0)[:, None]


def unchosen_tokens(batch: Batch) -> Tensor:
    """Return the tokens of trained rows that the policy did not choose: answers of tools, and
    messages to an agent. Nothing predicts the first token of a context.
    """
    actions = batch.action_mask
    others = batch.completion_mask & ~actions & (batch.all_offsets() > 0)
    return others & actions.any(1, keepdim=True)


def draw_texts(
    texts: Sequence[Sequence[int]],
    count: int,
    seed: int,
    runtime: Runtime,
) -> Callable[[int, int], Batch]:
    """Make `Term.rows`: `count` texts for each update, drawn anew and shared out to the processes;
    the first token of each is its prompt.
    """

    def rows(step: int, update: int) -> Batch:
        drawn = permutation(len(texts), seed, step, update)[:count]
        return Batch.of(
            [
                Row(
                    prompt_ids=texts[i][:1],
                    ids=texts[i][1:],
                    logprobs=[0.0] * (len(texts[i]) - 1),
                    actions=[False] * (len(texts[i]) - 1),
                    group=-1 - i,
                )
                for i in drawn[runtime.rank :: runtime.world]
            ],
            runtime.device,
        )

    return rows
