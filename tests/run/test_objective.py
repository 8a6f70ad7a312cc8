"""The sum of terms: what is weighted together, counted, replaced, and added to an update."""

import pytest
import torch

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.data import Batch
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run import Objective, Term
from rlhf_pg.run.objective import action_tokens
from tests.rows import batch_of
from tests.trainers.conftest import make as make

BATCH = batch_of([[1], [1]], [[2, 3, 4], [5]], actions=[[True, False, True], [True]])
OUTPUT = PolicyOutput(
    logprobs=torch.tensor([[-1.0, -7.0, -2.0], [-4.0, 0.0, 0.0]]),
    entropy=torch.tensor([[0.5, 9.0, 1.5], [3.0, 0.0, 0.0]]),
)


def loss(new, batch):
    return -new.logprobs, {"seen": new.logprobs}


def bonus(new, batch):
    return new.entropy, {}


def others(batch):
    return batch.completion_mask & ~batch.action_mask


def objective(*terms, aggregation="token_mean"):
    return Objective(
        terms, aggregation=aggregation, max_completion_length=10, all_sum=lambda count: count
    )


def value(summed, batch=BATCH, meter=None):
    return summed(OUTPUT, batch, summed.counts(batch), meter or Meter()).item()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 7 / 3), ("sequence_mean", (3 / 2 + 4) / 2), ("constant", 7 / 20)],
)
def test_term_is_aggregated_over_its_tokens(aggregation, expected):
    assert value(objective(Term(name="a", loss=loss), aggregation=aggregation)) == pytest.approx(
        expected
    )
    own = Term(name="a", loss=loss, aggregation=aggregation)
    assert value(objective(own)) == pytest.approx(expected)


def test_terms_add_with_coefficients_of_the_moment():
    coefs = iter([1.0, 2.0])
    summed = objective(
        Term(name="a", loss=loss, coef=0.5), Term(name="b", loss=bonus, coef=lambda: next(coefs))
    )
    assert value(summed) == pytest.approx((3.5 + 5) / 3)
    assert value(summed) == pytest.approx((3.5 + 10) / 3)
    assert len(summed.groups) == 1  # added per token, and weighted once


def test_each_group_of_terms_has_its_own_count():
    """And its metrics are means over its own tokens."""
    meter = Meter()
    summed = objective(
        Term(name="a", loss=bonus),
        Term(name="b", loss=loss, tokens=others, aggregation="token_mean"),
    )
    assert value(summed, meter=meter) == pytest.approx(5 / 3 + 7)
    assert meter.means(meter.sums())["seen"] == -7


def test_later_term_replaces_an_earlier_one_in_its_place():
    summed = objective(
        Term(name="a", loss=loss), Term(name="b", loss=bonus), Term(name="a", loss=bonus)
    )
    assert [*summed.terms] == ["a", "b"]
    assert value(summed) == pytest.approx(10 / 3)


def test_log_probabilities_beyond_actions_are_asked_for():
    assert objective(Term(name="a", loss=loss)).predict(BATCH) is BATCH
    marked = objective(Term(name="a", loss=loss, tokens=others)).predict(BATCH)
    assert marked.predicted.equal(BATCH.completion_mask)
    assert marked.action_mask.equal(BATCH.action_mask)


def test_rows_of_a_term_join_the_minibatch():
    asked = []

    def rows(step, update):
        asked.append((step, update))
        return batch_of([[7]], [[8, 9, 9, 9]], actions=[[False] * 4], groups=[-1])

    summed = objective(Term(name="a", loss=loss), Term(name="b", loss=bonus, rows=rows))
    joined = summed.with_rows(BATCH.with_columns(advantages=torch.ones(2, 3)), 4, 2)
    assert asked == [(4, 2)]
    assert joined.groups.tolist() == [0, 1, -1]
    assert joined.action_mask.sum(1).tolist() == [2, 1, 0]
    assert joined.advantages.tolist()[2] == [0] * 4


def test_numbers_of_rows_are_averaged_over_rows_with_tokens():
    def of_rows(new, batch):
        return new.logprobs, {"sizes": torch.tensor([2.0, 6.0])}

    for tokens, mean in ((others, 2.0), (action_tokens, 4.0)):
        meter = Meter()
        value(objective(Term(name="a", loss=of_rows, tokens=tokens)), meter=meter)
        assert meter.means(meter.sums()) == {"sizes": mean}


@pytest.mark.parametrize("name", ["seen", "loss"])
def test_metric_of_another_is_refused(name):
    """It would be averaged with that one."""
    twice = Term(name="b", loss=lambda new, batch: (new.logprobs, {name: new.entropy}))
    with pytest.raises(ValueError, match=f"'b' logs '{name}', as (a|the learner) does"):
        value(objective(Term(name="a", loss=loss), twice))


@pytest.mark.parametrize("name", ["estimate", "score", "loss", "regularizer", "prompts_of"])
def test_method_that_no_step_calls_is_refused(name):
    """Of the class, or of a mixin."""
    method = {name: lambda *_: None}
    for bases, own in (((GRPOTrainer,), method), ((type("Mixin", (), method), GRPOTrainer), {})):
        with pytest.raises(TypeError, match=rf"Mine\.{name} would not be called.*in its place"):
            type("Mine", bases, own)


def test_subclass_adds_a_term_in_three_lines(make):
    class Mine(GRPOTrainer):
        def terms(self) -> list[Term]:
            return [*super().terms(), Term(name="likely", loss=self.likely, coef=0.01)]

        def likely(self, new: PolicyOutput, batch: Batch):
            return -new.logprobs, {"likely": new.logprobs}

    plain, mine = make(GRPOTrainer), make(Mine)
    lines = [trainer.step() for trainer in (plain, mine)]
    assert lines[1]["likely"] < 0
    assert lines[1]["loss"] == pytest.approx(lines[0]["loss"] - 0.01 * lines[1]["likely"])
    assert isinstance(mine.args, GRPOConfig)


def test_term_of_the_entropy_has_a_gradient(make):
    """Although the keys ask for no bonus, and the entropy is detached then."""

    class Bonus(GRPOTrainer):
        def terms(self) -> list[Term]:
            bonus = Term(name="mine", loss=bonus_loss, coef=-self.size, entropy_gradient=True)
            return [*super().terms(), bonus]

    def bonus_loss(new, batch):
        return new.entropy, {}

    mine, keys = make(Bonus), make(GRPOTrainer, entropy_coef=0.1)
    mine.size = 0.1  # which the constructor of a subclass may set after its base's
    assert mine.step()["grad_norm"] == keys.step()["grad_norm"]


def test_observers_of_the_user_see_batches(make):
    trainer, seen = make(GRPOTrainer, max_steps=2), []
    trainer.observers = [seen.append]
    trainer.train()
    assert [len(batch.rows) for batch in seen] == [16, 16]


def test_metric_of_the_run_itself_is_refused(make):
    """It would replace the run's number, which controllers follow."""

    class Logging(GRPOTrainer):
        def terms(self):
            return [*super().terms(), Term(name="mine", loss=self.mine)]

        def mine(self, new, batch):
            return new.logprobs, {"grad_norm": new.logprobs}

    with pytest.raises(ValueError, match="a term: the run itself has a metric 'grad_norm'"):
        make(Logging).step()
