"""Groups without spread are drawn again: which prompts train then, and what the counters say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_pg import GRPOTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.runtime import FullWeights
from tests.rows import tensors

# By draw, prompts in their order; the scores of an easy prompt are all 1.
EASY = [True, False, True, False, False, True, False, True, True, False, False, True]
DATA = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(12)], "easy": EASY})


def spread(completions: list[str], easy: list[bool], **_: Any) -> list[float]:
    return [1.0 if e else float(i % 2) for i, e in enumerate(easy)]


@pytest.fixture
def trainer_of(make) -> Callable[..., GRPOTrainer]:
    """A trainer that takes four prompts of `DATA` a step, two completions each, in their order."""

    def build(rounds: int, **options: Any) -> GRPOTrainer:
        defaults = {
            "train_dataset": DATA,
            "reward_funcs": spread,
            "shuffle_dataset": False,
            "num_generations": 2,
            "dynamic_sampling_rounds": rounds,
        }
        return make(GRPOTrainer, **(defaults | options))

    return build


@pytest.mark.parametrize(
    ("rounds", "kept", "draws", "metrics"),
    [
        # 0 1 2 3, of which 1 and 3 have spread; 4 5 for the two others, then 6 for 5.
        (2, [1, 3, 4, 6], 7, {"sampling/rounds": 2, "sampling/kept_fraction": 4 / 7}),
        (5, [1, 3, 4, 6], 7, {"sampling/rounds": 2, "sampling/kept_fraction": 4 / 7}),
        # One round too few: 0, the earliest that was set aside, is the fourth.
        (1, [0, 1, 3, 4], 6, {"sampling/rounds": 1, "sampling/kept_fraction": 3 / 6}),
        (0, [0, 1, 2, 3], 4, {}),
    ],
)
def test_dynamic_sampling_keeps_groups_with_spread(
    trainer_of, rounds, kept, draws, metrics
) -> None:
    trainer = trainer_of(rounds)
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    assert (batch.num_prompts, batch.metrics) == (draws, metrics)
    rows = [draw for draw in kept for _ in range(2)]
    assert batch.dataset_rows == rows
    assert batch.prompts == [DATA["prompt"][row] for row in rows]
    assert batch.columns == {"easy": [EASY[row] for row in rows]}
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

    alone = trainer.sampler.roll_out(range(draws))
    places = [i for i, row in enumerate(alone.dataset_rows) if row in kept]
    assert batch.token_lists() == [alone.token_lists()[i] for i in places]
    assert batch.completions == [alone.completions[i] for i in places]
    expected = alone.select(torch.tensor(places))
    for name, value in tensors(expected).items():
        if name != "groups":
            torch.testing.assert_close(getattr(batch, name), value)
    assert batch.scores.shape[1] == batch.completion_ids.shape[1]
    totals = batch.scores.nansum(1).squeeze(1).tolist()
    assert totals == [1.0 if EASY[row] else float(i % 2) for i, row in enumerate(rows)]


def test_kept_groups_are_numbered_from_prompt_index(trainer_of) -> None:
    """Under their own numbers, 4, 6, 9 and 10, three groups of four would be in one minibatch."""
    trainer = trainer_of(2, num_mini_batches=2)
    batch = trainer.sampler.next_batch(4, Meter())  # 4 5 6 7 -> 4 and 6; 8 9 -> 9; 10
    assert batch.dataset_rows == [4, 4, 6, 6, 9, 9, 10, 10]
    assert batch.groups.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert batch.num_prompts == 7


def test_group_with_equal_weighted_totals_has_no_spread(trainer_of) -> None:
    """A source of weight 0, or two that cancel out, is no spread."""

    def minus_spread(**inputs: Any) -> list[float]:
        return [-score for score in spread(**inputs)]

    for functions, weights in (
        ([spread, lambda easy, **_: [2.0] * len(easy)], (0.0, 1.0)),
        ([spread, minus_spread], None),
    ):
        trainer = trainer_of(1, reward_funcs=functions, reward_weights=weights)
        batch = trainer.sampler.next_batch(0, Meter())
        assert batch.metrics["sampling/kept_fraction"] == 0.0


@pytest.mark.parametrize(
    "penalty",
    [
        {"overlong_buffer": 6},  # every token more costs
        {"missing_eos_penalty": 1.0},
        {"missing_eos_penalty": 1.0, "missing_eos_mode": "replace"},
    ],
)
def test_penalty_gives_group_of_equal_scores_no_spread(trainer_of, penalty) -> None:
    """Nor one that is all right (DAPO, Eq. 11)."""
    constant = {"reward_funcs": lambda easy, **_: [1.0] * len(easy), "num_generations": 4}
    trainer = trainer_of(1, **constant, **penalty, temperature=2.0)
    batch = trainer.sampler.next_batch(0, Meter())
    assert batch.metrics["sampling/kept_fraction"] == 0.0
    shaped = sum_step_scores(trainer.shaping.shape(batch.scores, batch))
    assert len(shaped.nansum(1).unique()) > 1  # there was something to be misled by


def test_single_valid_score_has_no_spread(trainer_of) -> None:
    """A source that applies to one completion of a group compares it with nothing."""

    def once(easy: list[bool], **_: Any) -> list[float | None]:
        return [float(i) if i % 2 or not e else None for i, e in enumerate(easy)]

    trainer = trainer_of(2, reward_funcs=[once, lambda easy, **_: [0.0] * len(easy)])
    assert trainer.sampler.next_batch(0, Meter()).dataset_rows[::2] == [1, 3, 4, 6]


@pytest.mark.fault(40, "the run goes on")
def test_step_without_spread_has_zero_gradient(trainer_of, tmp_path) -> None:
    trainer = trainer_of(1, reward_funcs=lambda easy, **_: [1.0] * len(easy), max_steps=2)
    trainer.train()
    assert trainer.state.prompt_index == 2 * 8
    for line in read(tmp_path / "run" / "metrics.jsonl"):
        assert (line["sampling/rounds"], line["sampling/kept_fraction"]) == (1, 0.0)
        assert (line["frac_reward_zero_std"], line["grad_norm"], line["loss"]) == (1.0, 0.0, 0.0)


def test_dynamic_sampling_counts_all_draws_and_tokens(trainer_of, tmp_path) -> None:
    asked: list[str] = []
    tokens: list[int] = []

    def watched(prompts, completion_ids, **inputs):
        asked.extend(prompts[::2])
        tokens.extend(map(len, completion_ids))
        return spread(**inputs)

    trainer = trainer_of(2, reward_funcs=watched, max_steps=2)
    trainer.train()
    # 0 ... 6 as above; then 7 8 9 10, of which 9 and 10 have spread, 11 0, and 1 for 11 and 0.
    assert asked == [DATA["prompt"][d % 12] for d in [*range(7), *range(7, 11), 11, 12, 13, 14]]
    assert trainer.state.prompt_index == 15
    prompt_tokens = sum(2 * len(trainer.train_prompts.tokens[d % 12]) for d in range(15))
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert trainer.state.num_tokens == lines[-1]["num_tokens"] == sum(tokens) + prompt_tokens
    assert [line["frac_reward_zero_std"] for line in lines] == [0.0, 0.25]
    assert [line["sampling/kept_fraction"] for line in lines] == [4 / 7, 3 / 8]


def test_weights_are_gathered_once_for_all_rounds(trainer_of, tmp_path, monkeypatch) -> None:
    """And for the greedy completions: it is the dearest thing to do where they lie in pieces."""
    trainer = trainer_of(2, advantage_estimator="returns_minus_greedy")
    fills: list[FullWeights] = []
    monkeypatch.setattr(FullWeights, "_fill", lambda whole, *_: fills.append(whole))
    metrics = trainer.step()
    assert metrics["sampling/rounds"] == 2
    assert fills == [trainer.learner.full_policy]
