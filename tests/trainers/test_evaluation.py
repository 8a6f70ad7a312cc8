"""Held-out rewards, greedy and sampled, and the best checkpoint by them."""

import json
import math
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_pg import Callback, GRPOConfig, PPOConfig, PPOTrainer
from rlhf_pg.models.critic import Critic
from rlhf_pg.models.policy import Reference
from rlhf_pg.report.pass_at_k import majority_score
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.evaluation import Evaluation
from rlhf_pg.trainers.evaluator import attempt_metrics, standard_error, stripped_text
from tests.trainers.conftest import digits

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


def test_evaluate_defaults_to_sampled_and_greedy(make) -> None:
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


class Listed:
    """Pays the four completions of a prompt what is listed, in turn for every prompt; nothing where
    there is one. Keeps the texts of the four.
    """

    def __init__(self, *rewards: Sequence[float]) -> None:
        places = {prompt: i % len(rewards) for i, prompt in enumerate(HELD_OUT["prompt"])}
        assert len(places) == len(HELD_OUT)
        self.paid = {prompt: rewards[place] for prompt, place in places.items()}
        self.seen: list[str] = []

    def __call__(self, prompts, completions, **columns) -> list[float]:
        if len(prompts) == 1:  # the greedy one
            return [0.0]
        self.seen += completions
        return [paid for prompt in prompts[::4] for paid in self.paid[prompt]]


def test_pass_at_k_and_standard_errors_by_hand(make) -> None:
    """Of 4 completions 1, 2 and 0 are right, 3 prompts each; errors are of means of prompts."""
    reward = Listed((0.2, 0.5, 0.0, 0.4), (0.5, 0.0, 0.9, 0.0), (0.49, 0.0, 0.0, 0.3))
    options = {"num_generations_eval": 4, "eval_success_threshold": 0.5}
    metrics = make(eval_dataset=HELD_OUT, reward_funcs=reward, **options).evaluate()
    assert metrics["eval_pass@1"] == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert metrics["eval_pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert metrics["eval_pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval_reward"] == pytest.approx((1.1 + 1.4 + 0.79) / 12)
    assert not {"eval_greedy_pass@1", "eval_pass@3", "eval_greedy_majority@4"} & set(metrics)
    for name, kinds in {
        "reward": (1.1 / 4, 1.4 / 4, 0.79 / 4),
        "pass@1": (1 / 4, 1 / 2, 0),
        "pass@2": (1 / 2, 5 / 6, 0),
    }.items():
        mean = sum(kinds) / 3
        variance = 3 * sum((x - mean) ** 2 for x in kinds) / (9 - 1)
        assert metrics[f"eval_{name}_stderr"] == pytest.approx(math.sqrt(variance / 9))
    assert metrics["eval_greedy_reward_stderr"] == 0.0


@pytest.mark.parametrize(("n", "sizes"), [(1, []), (6, [1, 2, 4, 6])])
def test_pass_at_k_sizes_are_powers_of_two_and_n(make, n, sizes) -> None:
    metrics = make(eval_dataset=HELD_OUT, num_generations_eval=n).evaluate(temperature=1.0)
    names = {name for name in metrics if "@" in name}
    expected = {f"eval_pass@{k}" for k in sizes}
    expected |= {f"eval_best@{n}", f"eval_majority@{n}"} if sizes else set()
    assert names == expected | {f"{name}_stderr" for name in expected}


def test_each_source_has_its_own_pass_at_k_beside_the_sum() -> None:
    """Two prompts, two attempts: a length penalty keeps the sum of a right answer below 1."""
    right, short = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.full((2, 2), -0.1)
    judged = torch.stack([right + short, right, short, short], dim=2)
    metrics = attempt_metrics(judged, ["right", "short"], 1.0)
    for name, expected in {"": 0.0, "rewards/right/": 0.5, "rewards/short/": 0.0}.items():
        assert metrics[f"{name}pass@2"] == expected
    assert metrics["best@2"] == pytest.approx((0.9 - 0.1) / 2)
    assert metrics["highest_score"] == pytest.approx(0.9)
    alone = attempt_metrics(judged[:, :, 1:], ["right"], 1.0)
    assert not any(name.startswith("rewards/") for name in alone)  # it would say the same twice


def test_standard_error_weighs_prompts_by_their_completions() -> None:
    """Two prompts, one with a completion that no source scored: sums of deviations, by hand."""
    values = torch.tensor([1.0, 0.0, 0.0, math.nan])
    owners = torch.tensor([7, 7, 3, 3])
    # mean 1/3; sums of deviations 1/3 and -1/3; sqrt(2 / 1 * 2 / 9) / 3
    assert standard_error(values, owners) == pytest.approx(math.sqrt(4 / 9) / 3)
    assert math.isnan(standard_error(values[:2], owners[:2]))


def test_standard_error_of_sources_for_different_prompts_by_bootstrap() -> None:
    """Each of two sources scores half of the prompts; the reward is the sum of their means."""
    noise = torch.Generator().manual_seed(0)
    owners = torch.arange(80).repeat_interleave(3)
    scores = torch.randn(240, 2, generator=noise).double() + torch.tensor([5.0, -2.0])
    scores += torch.randn(80, 1, generator=noise)[owners]  # those of a prompt resemble each other
    scores[torch.arange(240), 1 - owners % 2] = math.nan
    sums = []
    for _ in range(2000):
        drawn = torch.randint(80, (80,), generator=noise)
        sums.append(scores.view(80, 3, 2)[drawn].flatten(0, 1).nanmean(0).sum())
    assert standard_error(scores, owners) == pytest.approx(torch.stack(sums).std().item(), rel=0.08)


def test_majority_scores_most_frequent_answer(make) -> None:
    reward = Listed((1.0, 0.0, 0.0, 0.5))
    trainer = make(eval_dataset=HELD_OUT, reward_funcs=reward, num_generations_eval=4)
    plain = trainer.evaluate()["eval_majority@4"]
    said = list(reward.seen)
    by_hand = [majority_score(said[i : i + 4], (1.0, 0.0, 0.0, 0.5)) for i in range(0, 36, 4)]
    assert plain == pytest.approx(sum(by_hand) / 9)
    asked = []

    def answer(completion):
        asked.append(completion)
        return "the same" if len(asked) % 4 in (2, 3) else len(asked)  # of four, two in the middle

    assert trainer.evaluate(answer=answer)["eval_majority@4"] == pytest.approx(0.0)
    assert asked == said


def test_answer_to_vote_on_is_the_last_message() -> None:
    chat = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": " 4 2 "}]
    assert [stripped_text(given) for given in (" 42\n", chat, [])] == ["42", "4 2", ""]


def test_pass_at_k_ignores_penalties_and_clipping(make) -> None:
    """Weighted, as they gave it: neither penalties nor clipping make an answer right or wrong."""

    def half(completions, **_):
        return [0.5] * len(completions)

    def wrong(completions, **_):
        return [-9.0 if text else None for text in completions]

    trainer = make(
        eval_dataset=HELD_OUT,
        reward_funcs=[half, wrong],
        reward_weights=(2.0, 0.0),
        missing_eos_penalty=5.0,
        missing_eos_mode="replace",
        reward_clip_range=(-0.1, 0.1),
        num_generations_eval=2,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_pass@1"] == metrics["eval_pass@2"] == metrics["eval_majority@2"] == 1
    assert metrics["eval_reward"] < 0.5


def test_prompt_with_a_lost_completion_leaves_pass_at_k_and_majority(make) -> None:
    """Of nine prompts three lose their completions; of the others half are right."""
    reward = Listed((1.0, math.inf, 1.0, 1.0), (1.0,) * 4, (0.0,) * 4)
    options = {"num_generations_eval": 4, "on_reward_error": "drop"}
    trainer = make(eval_dataset=HELD_OUT, reward_funcs=reward, **options)
    metrics = trainer.evaluate(answer=lambda completion: "the same")
    assert metrics["eval_rewards/Listed/failed"] == 12 / 36
    assert metrics["eval_reward"] == pytest.approx(12 / 24)
    for name in ("pass@1", "pass@2", "pass@4", "majority@4"):
        assert metrics[f"eval_{name}"] == pytest.approx(0.5)
        assert metrics[f"eval_{name}_stderr"] == pytest.approx(math.sqrt(6 * 0.25 / 5 / 6))


def test_float32_rounding_does_not_fail_threshold(make) -> None:
    rewards = [lambda completions, **_: [0.9] * len(completions) for _ in range(3)]
    weights = (0.5, 0.25, 1 / 0.9 - 0.75)
    trainer = make(
        eval_dataset=HELD_OUT, reward_funcs=rewards, reward_weights=weights, num_generations_eval=2
    )
    assert trainer.evaluate()["eval_pass@1"] == 1


def test_first_eval_completion_does_not_depend_on_count(make) -> None:
    seen = {}
    for n in (1, 3):
        script = Script(1.0)
        make(eval_dataset=HELD_OUT, reward_funcs=script, num_generations_eval=n).evaluate()
        seen[n] = [text for batch in script.seen[:9] for text in batch]
    assert seen[3][::3] == seen[1]
    assert len(seen[3]) == 27


def test_eval_reward_std_is_within_prompt(make) -> None:
    reward = Listed((0.0, 1.0, 0.0, 1.0), (5.0, 5.0, 5.0, 5.0))
    trainer = make(eval_dataset=HELD_OUT, reward_funcs=reward, num_generations_eval=4)
    metrics = trainer.evaluate(temperature=1.0)
    assert metrics["eval_reward_std"] == pytest.approx(5 / 9 * (1 / 3) ** 0.5)
    assert metrics["eval_frac_reward_zero_std"] == pytest.approx(4 / 9)


def test_best_checkpoint_has_highest_eval_reward(make, tmp_path) -> None:
    script = Script(0.2, 0.9, 0.5, 0.9, 0.0)
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
    assert state["counters"]["step"] == 2
    assert state["counters"]["best_reward"] == pytest.approx(0.9)
    kept = AutoModelForCausalLM.from_pretrained(run / "best").lm_head.weight
    assert kept.equal(clock.weights[2])
    assert not kept.equal(clock.weights[4])
    assert (run / "best" / "critic").exists()
    assert not (run / "checkpoints").exists()


def test_best_that_could_not_be_saved_is_not_remembered(make, monkeypatch) -> None:
    trainer = make(eval_dataset=HELD_OUT, eval_steps=1, max_steps=1)

    def save(runtime, path=None, **_):
        raise OSError("no space left")

    monkeypatch.setattr(trainer.checkpointer, "save", save)
    with pytest.raises(OSError, match="no space"):
        trainer.train()
    assert trainer.state.best_reward is None


def test_error_of_no_values_is_unknown() -> None:
    assert math.isnan(standard_error(torch.empty(0, 2), torch.empty(0, dtype=torch.int64)))


def test_nan_evaluation_is_never_best(make, monkeypatch, tmp_path) -> None:
    trainer = make(eval_dataset=HELD_OUT, eval_steps=1, max_steps=4)
    rewards = iter([math.nan, 0.25, math.nan, 0.5])
    monkeypatch.setattr(trainer, "evaluate", lambda: {"eval_reward": next(rewards)})
    kept = []
    monkeypatch.setattr(
        trainer.checkpointer,
        "save",
        lambda *_: kept.append((trainer.state.step, trainer.state.best_reward)),
    )
    trainer.train()
    assert kept == [(2, 0.25), (4, 0.5)]


def test_run_resumed_from_best_keeps_best_reward(make, tmp_path) -> None:
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


def test_best_is_kept_by_directory_and_not_by_its_spelling(make, tmp_path) -> None:
    options = {"eval_dataset": HELD_OUT, "eval_steps": 1, "reward_funcs": Script(0.5)}
    make(save_steps=1, max_steps=1, **options).train()
    before = (tmp_path / "run" / "best" / "state.json").read_bytes()
    make(output_dir=f"{tmp_path}/run/../run", max_steps=2, **options).train("latest")
    assert (tmp_path / "run" / "best" / "state.json").read_bytes() == before  # .5 is no better
    saved = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    elsewhere = make(output_dir=str(tmp_path / "new"), max_steps=2, **options)
    elsewhere.train(resume_from_checkpoint=saved)
    assert (tmp_path / "new" / "best" / "state.json").exists()


SIZES = {"num_generations_eval": 3, "max_completion_length": 6}


def test_evaluation_gives_numbers_of_trainer(make, model_path, tmp_path, monkeypatch) -> None:
    options = SIZES | {"beta": 0.1, "output_dir": str(tmp_path / "run"), "temperature": 0.8}
    expected = make(PPOTrainer, eval_dataset=HELD_OUT, **options).evaluate()

    def refuse(*_, **__):
        raise AssertionError("only training needs this")

    for unwanted in (torch.optim.AdamW, Critic, Reference):
        monkeypatch.setattr(unwanted, "__init__", refuse)
    alone = Evaluation(model_path, digits, PPOConfig(**options), HELD_OUT)
    assert alone.evaluate() == pytest.approx(expected, abs=0, rel=0, nan_ok=True)


def test_evaluation_of_adapter_adds_no_other(make, model_path, tmp_path) -> None:
    options = {"use_peft": True, "lora_r": 2, "max_steps": 2, "learning_rate": 0.1, **SIZES}
    trainer = make(eval_dataset=HELD_OUT, **options)
    trainer.train()
    expected = trainer.evaluate()
    adapter = str(tmp_path / "run" / "final")
    alone = Evaluation(adapter, digits, GRPOConfig(use_peft=True, lora_r=2, **SIZES), HELD_OUT)
    assert alone.evaluate() == pytest.approx(expected, nan_ok=True)
    with pytest.raises(ValueError, match="cannot train"):
        alone.train()


def test_uncountable_answer_is_refused(make) -> None:
    with pytest.raises(ValueError, match=r"answer .* set num_generations_eval"):
        make(eval_dataset=HELD_OUT).evaluate(answer=str.lower)

    def letters(completion):
        return list(completion)

    trainer = make(eval_dataset=HELD_OUT, num_generations_eval=2)
    with pytest.raises(ValueError, match=r"letters must return hashable answers"):
        trainer.evaluate(answer=letters)
