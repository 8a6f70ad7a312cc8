"""Environments of the real `verifiers`, as its users write them, played and paid by a trainer."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.episodes.adapters import AdaptedTask, load_task
from rlhf_pg.tasks import calculator
from rlhf_pg.tasks.multi_turn import CHARACTERS
from rlhf_pg.tasks.tiny import tool_tokenizer
from tests.episodes.scripted import ScriptedEngine

pytestmark = pytest.mark.tasks

# A tiny model with room for errors.
WIDE = dataclasses.replace(
    calculator(),
    make_tokenizer=lambda: tool_tokenizer(CHARACTERS, []),
    max_positions=512,
)


@pytest.fixture(autouse=True)
def installed(monkeypatch) -> None:
    """The environments stand where installed packages do."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "environments")


@pytest.fixture
def play(tmp_path) -> Callable[..., GRPOTrainer]:
    """play(task, says, ...): a trainer whose policy says `says[sample][turn]`."""

    def build(task: AdaptedTask, *says: tuple[str, ...], **options: Any) -> GRPOTrainer:
        torch.manual_seed(0)
        model, tokenizer = WIDE.new_model()
        settings = {
            "max_completion_length": 400,
            "prompts_per_step": 1,
            "num_generations": max(2, len(says)),
            "max_steps": 1,
            "shuffle_dataset": False,
            "output_dir": str(tmp_path / "run"),
        }
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=GRPOConfig(**(settings | options)),
            **task._asdict(),
        )

        def script(request, sample: int) -> list[int]:
            row = request.tokens[len(request.tokens) - request.position :]
            turn = says[sample][list(row).count(tokenizer.eos_token_id)]
            return [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]

        if says:
            trainer.sampler.engine = ScriptedEngine(script, tokenizer.eos_token_id)
        return trainer

    return build


def totals(trainer: GRPOTrainer, samples: Any) -> list[float]:
    return trainer.sampler.add_rewards(samples).scores.nansum(dim=(1, 2)).tolist()


def test_single_turn_is_paid_by_weighted_rubric(play) -> None:
    task = load_task("verifiers:mirrored-words", {"words": 3})
    assert (len(task.train_dataset), len(task.eval_dataset)) == (3, 1)
    trainer = play(task, ("zaa",), ("no",))
    shown = trainer.processing_class.decode(trainer.train_prompts.tokens[0])
    assert "Backwards." in shown
    assert shown.endswith("<user>aaz<assistant>")
    samples = trainer.sampler.roll_out(range(1))
    assert samples.prompt_ids[0].tolist() == trainer.train_prompts.tokens[0]
    assert totals(trainer, samples) == pytest.approx([1 - 0.03, -0.02])
    assert [episode.turns for episode in samples.episodes] == [1, 1]


def test_environment_answers_until_it_is_done(play) -> None:
    trainer = play(load_task("verifiers:higher_lower"), ("7", "3", "5"), ("5",))
    samples = trainer.sampler.roll_out(range(1))
    said = [message["content"] for message in samples.completions[0]]
    assert said == ["7", "lower", "3", "higher", "5"]
    assert totals(trainer, samples) == pytest.approx([1 / 3, 1])
    assert [episode.error for episode in samples.episodes] == [None, None]
    paid = [math.isnan(reward) for reward in samples.episodes[0].rewards]
    assert paid == [True] * (len(paid) - 1) + [False]


def test_limits_of_either_side_end_an_episode_that_is_still_paid(play) -> None:
    task = load_task("verifiers:higher_lower")
    theirs = play(task, ("9",) * 4, ("5",)).sampler.roll_out(range(1))
    assert [episode.turns for episode in theirs.episodes] == [4, 1]
    trainer = play(task, ("9",) * 4, ("5",), max_turns=2)
    ours = trainer.sampler.roll_out(range(1))
    assert [episode.turns for episode in ours.episodes] == [2, 1]
    assert ours.truncated.tolist() == [True, False]
    assert totals(trainer, ours) == [0, 1]


def test_error_of_environment_fails_its_episode_alone(play) -> None:
    trainer = play(load_task("verifiers:higher_lower"), ("13",), ("5",))
    samples = trainer.sampler.roll_out(range(1))
    broken, good = (episode.error for episode in samples.episodes)
    assert "InfraError" in broken
    assert good is None
    assert not samples.action_mask[0].any()


def test_environment_that_rewrites_the_past_is_told_so(play) -> None:
    trainer = play(load_task("verifiers:higher_lower", {"forgets": True}), ("7", "5"), ("5",))
    errors = [episode.error for episode in trainer.sampler.roll_out(range(1)).episodes]
    assert "only append" in errors[0]
    assert errors[1] is None


def test_tools_are_shown_called_and_counted(play) -> None:
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    wrong = '<tool_call>{"name": "divide", "arguments": {}}</tool_call><tool_call>{</tool_call>'
    says = ((call, "42"), (wrong, "41"), ("42",))
    trainer = play(load_task("verifiers:with_tools"), *says)
    prompt = trainer.processing_class.decode(trainer.train_prompts.tokens[0])
    assert prompt == "<tools>multiply<user>6*7<assistant>"
    samples = trainer.sampler.roll_out(range(1))
    assert [episode.error for episode in samples.episodes] == [None] * 3
    assert [message["role"] for message in samples.completions[1]] == [
        *("assistant", "tool", "tool", "assistant")
    ]
    assert samples.completions[0][1]["content"] == "42"
    assert totals(trainer, samples) == pytest.approx([1.25, 0.5, 1])


def test_policy_trains_and_is_evaluated(play) -> None:
    trainer = play(load_task("verifiers:mirrored_words"), max_completion_length=8, max_steps=2)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not before.equal(trainer.model.lm_head.weight)
    assert trainer.evaluate()["eval_episodes/failed"] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("verifiers:no_such", {}, "environment no_such cannot be loaded: .*no_such"),
        ("verifiers:mirrored_words", {"letters": 3}, "cannot be loaded: .*letters"),
        ("verifiers:higher_lower", {"groups": True}, "compares completions"),
    ],
)
def test_unfit_environment_is_refused(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(name, options)
