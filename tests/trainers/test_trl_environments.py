"""Trainers on environments as TRL has them, from the prompt that shows the tools to the reward."""

import json
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_pg import GRPOTrainer
from rlhf_pg.episodes.adapters import TrlEnvironments
from rlhf_pg.tasks import calculator
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.episodes.scripted import ScriptedEngine

CALL = '<tool_call>{"name": "press", "arguments": {"times": 3}}</tool_call>'


class Bell:
    def reset(self, start: int = 0) -> str:
        self.rung = start
        return "!"

    def press(self, times: int) -> int:
        """Ring.

        Args:
            times: how often.
        """
        self.rung += times
        return self.rung


class Paid(Bell):
    def get_reward(self) -> float:
        return float(self.rung)


class Lamp:
    def reset(self) -> None:
        pass

    def light(self) -> str:
        """Switch it on."""
        return "on"

    def get_reward(self) -> float:
        return 0.5


def trainer_on(make, factory: Any, **options: Any) -> PolicyGradientTrainer:
    """A trainer whose model calls `press` once and then says "ok"."""
    torch.manual_seed(0)
    model, tokenizer = calculator().new_model()
    question = [{"role": "user", "content": "q"}]
    rows = Dataset.from_list([{"prompt": question, "start": i} for i in range(2)])
    settings = {
        "train_dataset": rows,
        "reward_funcs": (),
        "environment_factory": TrlEnvironments(factory),
        "max_completion_length": 100,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_steps": 1,
        "shuffle_dataset": False,
    }
    trainer = make(GRPOTrainer, model=model, processing_class=tokenizer, **(settings | options))

    def script(request, sample: int) -> list[int]:
        text = "ok" if request.position else CALL
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    trainer.sampler.engine = ScriptedEngine(script, tokenizer.eos_token_id)
    return trainer


def instances(batch):
    return [episode.environment.trl_instance for episode in batch.episodes]


def test_methods_reach_template_and_get_reward_pays(make, any_sampler, tmp_path) -> None:
    trainer = trainer_on(make, Paid)
    samples = trainer.sampler.roll_out(range(2))
    tokenizer = trainer.processing_class
    assert tokenizer.decode(trainer.train_prompts.tokens[0]) == "<tools>press<user>q<assistant>"
    assert samples.prompts[0] == [{"role": "user", "content": "q!"}]
    assert [environment.rung for environment in instances(samples)] == [3, 3, 4, 4]
    assert samples.completions[0][1]["content"] == "3"
    assert trainer.shaping.names == ["environment"]
    assert trainer.sampler.add_rewards(samples).scores.nansum(dim=(1, 2)).tolist() == [3, 3, 4, 4]
    trainer.train()
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["rewards/environment/mean"] == 3.5
    assert line["tools/call_frequency"] == 1


def test_environment_that_pays_nothing_is_no_source(make) -> None:
    def length(completions, **_):
        return [float(len(messages)) for messages in completions]

    trainer = trainer_on(make, Bell, reward_funcs=length, reward_weights=(1.0,))
    assert trainer.shaping.names == ["length"]
    scored = trainer.sampler.add_rewards(trainer.sampler.roll_out(range(2)))
    assert scored.scores.nansum(dim=(1, 2)).tolist() == [3.0] * 4


def test_column_chooses_environment(make) -> None:
    rows = Dataset.from_list([{"environment": "bell"}, {"environment": "lamp"}])
    trainer = trainer_on(make, {"bell": Paid, "lamp": Lamp}, train_dataset=rows)
    shown = [trainer.processing_class.decode(ids) for ids in trainer.train_prompts.tokens]
    assert shown == ["<tools>press<user><assistant>", "<tools>light<user><assistant>"]
    samples = trainer.sampler.roll_out(range(2))
    assert [type(environment) for environment in instances(samples)] == [Paid, Paid, Lamp, Lamp]
    assert trainer.sampler.add_rewards(samples).scores.nansum(dim=(1, 2)).tolist() == [
        3,
        3,
        0.5,
        0.5,
    ]


def test_environment_may_bring_all_prompts(make) -> None:
    trainer = trainer_on(make, Paid, train_dataset=None)
    assert trainer.sampler.roll_out(range(2)).prompts == [[{"role": "user", "content": "!"}]] * 4


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (Paid, {"train_dataset": None, "max_steps": -1}, "set max_steps"),
        (Paid, {"train_dataset": [{"prompt": "q"}]}, "is a string, but tools"),
        ({"a": Paid}, {}, "train_dataset: row 0: its column 'environment'"),
        (Bell, {}, "reward_funcs is empty"),
    ],
)
def test_bad_input_is_refused(make, factory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_on(make, factory, **options)


def test_tools_are_called_and_counted(make, any_sampler, tmp_path) -> None:
    """The model types what it is told to: a call, a wrong call, no call at all."""
    task = calculator()
    torch.manual_seed(0)
    model, tokenizer = task.new_model()
    options = {"prompts_per_step": 1, "num_generations": 3, "max_steps": 1, "max_turns": 3}
    trainer = make(
        model=model,
        processing_class=tokenizer,
        reward_funcs=task.reward,
        train_dataset=task.train_dataset.select([0]),
        tools=task.tools,
        max_completion_length=100,
        **options,
    )
    asked, answer = (trainer.train_prompts.rows[0][key] for key in ("prompt", "answer"))
    asked = asked[0]["content"]
    call = '<tool_call>{"name": "calculate", "arguments": {"%s": "%s"}}</tool_call>'
    calls = [call % ("expression", asked), call % ("sum", asked), answer]

    def script(request, sample: int) -> list[int]:
        text = answer if request.position else calls[sample]
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    trainer.sampler.engine = ScriptedEngine(script, tokenizer.eos_token_id)
    prompt = tokenizer.decode(trainer.train_prompts.tokens[0])
    assert prompt == f"<tools>calculate<user>{asked}<assistant>"
    right, wrong, none = trainer.sampler.roll_out(range(1)).completions
    assert [message["role"] for message in right] == ["assistant", "tool", "assistant"]
    assert right[1]["content"] == answer
    assert "argument 'sum'" in wrong[1]["content"]
    assert [message["content"] for message in none] == [answer]
    trainer.train()
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["reward"] == 1
    assert line["tools/call_frequency"] == pytest.approx(2 / 3)
    assert line["tools/failure_frequency"] == 0.5


def test_rows_without_prompts_are_evaluated(make, any_sampler) -> None:
    rows = Dataset.from_list([{"start": 1}])
    assert trainer_on(make, Paid).evaluate(rows, temperature=1.0)["eval_reward"] == 4.0
