"""Held-out rewards, greedy and sampled, and the best checkpoint by them."""

import json

import pytest
from transformers import AutoModelForCausalLM

from rlhf_pg import Callback, PPOTrainer
from rlhf_pg.metrics import read
from rlhf_pg.tasks import arithmetic

HELD_OUT = arithmetic().eval_dataset.select(range(9))


class Script:
    """A reward that pays what is written down for each step, and keeps what it has seen."""

    def __init__(self, *by_step: float) -> None:
        self.by_step = by_step
        self.step = 0
        self.seen: list[list[str]] = []

    def __call__(self, completions, **columns) -> list[float]:
        self.seen.append(completions)
        return [self.by_step[self.step]] * len(completions)


class Clock(Callback):
    """Turns the page after a step, and remembers the weights that were evaluated."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.weights = {}

    def on_step(self, trainer, metrics) -> None:
        self.script.step = trainer.state.step
        self.weights[trainer.state.step] = trainer.model.lm_head.weight.detach().clone()


def test_both_ways_by_default_and_one_if_asked(make) -> None:
    trainer = make(eval_dataset=HELD_OUT)
    both = trainer.evaluate()
    sampled, greedy = trainer.evaluate(temperature=1.0), trainer.evaluate(temperature=0.0)
    assert {k: v for k, v in both.items() if not k.startswith("eval_greedy_")} == sampled
    again = {k.replace("eval_", "eval_greedy_", 1): v for k, v in greedy.items()}
    assert {k: v for k, v in both.items() if k.startswith("eval_greedy_")} == again
    assert both["eval_reward"] != both["eval_greedy_reward"]
    assert set(trainer.evaluate(temperature=0.0, metric_key_prefix="test")) == {
        k.replace("eval_", "test_", 1) for k in greedy
    }


def test_greedy_takes_the_likeliest_tokens(make, model_path) -> None:
    script = Script(1.0)
    trainer = make(eval_dataset=HELD_OUT, reward_funcs=script)
    trainer.evaluate(temperature=0.0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), trainer.processing_class
    for prompt, said in zip(HELD_OUT["prompt"], script.seen[0], strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        full = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(full, skip_special_tokens=True) == said


def test_eval_steps_write_both_into_the_line_of_the_step(make, tmp_path) -> None:
    make(eval_dataset=HELD_OUT, eval_steps=2, max_steps=4).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert ["eval_reward" in line for line in lines] == [False, True, False, True]
    assert ["eval_greedy_reward" in line for line in lines] == [False, True, False, True]


@pytest.mark.parametrize(
    ("rewards", "best"), [((0.2, 0.9, 0.5, 0.9), 2), ((0.4, 0.3, 0.2, 0.1), 1)]
)
def test_the_best_checkpoint_is_kept(make, tmp_path, rewards, best) -> None:
    script = Script(*rewards, 0.0)
    clock = Clock(script)
    trainer = make(
        PPOTrainer,
        reward_funcs=script,
        eval_dataset=HELD_OUT,
        eval_steps=1,
        max_steps=4,
        learning_rate=1e-2,
        callbacks=[clock],
        beta=0.1,
    )
    trainer.train()
    run = tmp_path / "run"
    state = json.loads((run / "best" / "state.json").read_text())
    assert state["counters"]["step"] == best
    assert state["counters"]["best_reward"] == pytest.approx(rewards[best - 1])
    kept = AutoModelForCausalLM.from_pretrained(run / "best").lm_head.weight
    assert kept.equal(clock.weights[best])
    assert not kept.equal(clock.weights[4])
    assert (run / "best" / "critic").exists()
    assert not (run / "checkpoints").exists()


def test_a_run_can_go_on_from_the_best(make, tmp_path) -> None:
    options = {"eval_dataset": HELD_OUT, "eval_steps": 1, "max_steps": 3}
    script = Script(0.2, 0.9, 0.5, 0.0)
    make(reward_funcs=script, callbacks=[Clock(script)], **options).train()
    best = tmp_path / "run" / "best"
    script = Script(0.2, 0.9, 0.5, 0.0)
    script.step = 2
    rest = make(reward_funcs=script, callbacks=[Clock(script)], **options)
    rest.train(resume_from_checkpoint=str(best))
    assert rest.state.step == 3
    assert rest.state.best_reward == pytest.approx(0.9)  # .5 is no better
    assert json.loads((best / "state.json").read_text())["counters"]["step"] == 2


def test_going_on_in_another_directory_there_is_a_best_there_too(make, tmp_path) -> None:
    options = {"eval_dataset": HELD_OUT, "eval_steps": 1, "reward_funcs": Script(0.5)}
    make(save_steps=2, max_steps=2, **options).train()
    saved = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    make(output_dir=str(tmp_path / "new"), **options).train(resume_from_checkpoint=saved)
    assert (tmp_path / "new" / "best" / "state.json").exists()


def test_a_callback_may_add_an_evaluation_of_its_own(make) -> None:
    class Own(Callback):
        def on_step(self, trainer, metrics) -> None:
            metrics |= trainer.evaluate(temperature=0.5)

    make(eval_dataset=HELD_OUT, callbacks=[Own()]).train()


def test_no_best_if_not_wanted(make, tmp_path) -> None:
    make(eval_dataset=HELD_OUT, eval_steps=1, save_best=False).train()
    assert not (tmp_path / "run" / "best").exists()
