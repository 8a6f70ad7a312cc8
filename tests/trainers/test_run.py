"""What a run does and leaves behind, and how it goes on after a stop."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from rlhf_pg import Callback, GRPOConfig, PPOTrainer, ReinforceTrainer
from rlhf_pg.advantages.estimators import ADVANTAGES
from rlhf_pg.checkpoint.atomic import find_damage
from rlhf_pg.config.parse import parse
from rlhf_pg.losses import POLICY_LOSSES
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.trainers.conftest import digits
from tests.untimed import untimed, without_times


@pytest.fixture(autouse=True)
def forgets_functions() -> Iterator[None]:
    """Functions of a test's own are not there for the tests after it."""
    with patch.dict(POLICY_LOSSES), patch.dict(ADVANTAGES):
        yield


@pytest.mark.parametrize("trainer_type", [ReinforceTrainer, PPOTrainer])
def test_run_directory_holds_expected_files(make, trainer_type, tmp_path) -> None:
    trainer = make(trainer_type, beta=0.1, log_completions_steps=2, save_steps=2)
    ended = trainer.train()
    run = tmp_path / "run"
    lines = read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in trainer.history] == [line["loss"] for line in lines]
    assert (ended.global_step, ended.metrics["reward"]) == (3, lines[-1]["reward"])
    assert ended.training_loss == pytest.approx(sum(line["loss"] for line in lines) / 3)
    assert set(KEYS) <= set(lines[0])
    assert "rewards/digits/mean" in lines[0]
    absent = {key for key in KEYS if lines[0][key] is None}
    vanilla = {"clip_ratio/region_mean"} if trainer_type is ReinforceTrainer else set()
    assert absent == vanilla
    assert {"rewards/digits/std", "policy_loss", "entropy_coef"} <= set(lines[0])
    critic = {"value_loss", "explained_variance"}
    assert (critic <= set(lines[0])) == (trainer_type is PPOTrainer)
    assert lines[0].get("value_learning_rate", lines[0]["learning_rate"]) == 1e-3
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert lines[2]["kl"] != 0
    assert (run / "final" / "critic").exists() == (trainer_type is PPOTrainer)
    completions = read(run / "completions.jsonl")
    # Every completion of the first step, the second and the last.
    assert [c["step"] for c in completions] == [1] * 16 + [2] * 16 + [3] * 16
    about = {"step", "prompt_index", "sample", "advantage", "truncated"}
    assert set(completions[0]) == about | {"prompt", "completion", "rewards/digits"}
    assert len(list((run / "tokens").iterdir())) == 3  # a record of every step
    saved = parse(trainer.config_type, ["--config", str(run / "config.yaml")])
    assert saved == trainer.resolved_args()
    assert steps_of(run / "checkpoints") == [2, 3]  # every second, and the last

    model = AutoModelForCausalLM.from_pretrained(run / "final")
    trained = dict(trainer.model.named_parameters())
    assert all(p.equal(trained[name]) for name, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(run / "final").eos_token == "<eos>"


OWN = """
def loss(logprobs, old_logprobs, advantages, mask, epsilon):
    return -epsilon * advantages * logprobs.where(mask, 0.0), {}

def estimator(inputs):
    return inputs.rewards
"""


def test_loss_and_estimator_of_own_file_are_recorded_and_found(make, tmp_path, monkeypatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = {"policy_loss": "own.py:loss", "advantage_estimator": "own.py:estimator"}
    for registry in (POLICY_LOSSES, ADVANTAGES):
        for name in ("loss", "estimator"):
            monkeypatch.setitem(registry, f"{tmp_path}/own.py:{name}", None)
            del registry[f"{tmp_path}/own.py:{name}"]  # and again when the test is over
    with pytest.raises(ValueError, match="delta is not used"):
        make(**own, delta=2.0)
    with pytest.raises(ValueError, match=r"policy_loss .*\(logprobs, old_logprobs"):
        make(policy_loss="own.py:estimator")
    trainer = make(**own, epsilon=0.5, max_steps=1)
    trainer.train()
    assert trainer.policy_loss.keywords == {"epsilon": 0.5}
    saved = parse(GRPOConfig, ["--config", str(tmp_path / "run" / "config.yaml")])
    for key, name in own.items():
        assert getattr(saved, key) == f"{tmp_path}/{name}"


def test_logged_loss_is_sum_of_logged_parts(make, tmp_path) -> None:
    options = {"vf_coef": 0.3, "entropy_coef": 0.2, "beta": 0.5, "kl_placement": "loss"}
    options |= {"kl_estimator": "k3"}
    make(PPOTrainer, learning_rate=0.01, **options).train()
    for line in read(tmp_path / "run" / "metrics.jsonl"):
        parts = line["policy_loss"] + 0.3 * line["value_loss"] - 0.2 * line["entropy"]
        assert line["loss"] == pytest.approx(parts + 0.5 * line["kl"], abs=1e-6)
        assert line["entropy_coef"] == 0.2
    assert line["kl"] > 1e-4


def test_step_metrics_match_samples(make) -> None:
    trainer = make(max_steps=1)
    rollout = trainer.sampler.roll_out(range(4))
    trainer.train()
    (metrics,) = read(Path(trainer.args.output_dir) / "metrics.jsonl")
    lengths = rollout.completion_mask.sum(1).float()
    assert metrics["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert metrics["completions/clipped_ratio"] == rollout.truncated.float().mean().item()
    assert metrics["reward"] == pytest.approx(metrics["rewards/digits/mean"])
    assert metrics["num_tokens"] == rollout.prompt_mask.sum() + rollout.completion_mask.sum()
    assert metrics["kl"] is None  # without a reference


def test_dropout_is_off_by_default(make) -> None:
    model = make().model
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    assert any(getattr(module, "attention_dropout", 0) > 0 for module in model.modules())
    fresh = make(model=model).model
    assert all(getattr(module, "attention_dropout", 0) == 0 for module in fresh.modules())


def test_earlier_runs_are_set_aside(make, tmp_path, capsys) -> None:
    for steps in (1, 2, 1):
        make(max_steps=steps, save_steps=1).train()
    run = tmp_path / "run"
    for place, steps in {"earlier-1": 1, "earlier-2": 2, ".": 1}.items():
        assert len(read(run / place / "metrics.jsonl")) == steps
        assert find_damage(run / place / "checkpoints" / f"step-{steps:08d}") is None
    assert (run / "earlier-1" / "final" / "config.json").exists()
    assert "had an earlier run or a model, which was moved to" in capsys.readouterr().out


def test_run_without_step_leaves_nothing_and_moves_nothing(make, tmp_path) -> None:
    """Not even the directory above its own; files that are not of a run stay."""

    def fails(completions, **_):
        raise RuntimeError("no server")

    def contents(directory: Path) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}

    new = tmp_path / "above" / "new"
    with pytest.raises(ValueError, match="no server"):
        make(reward_funcs=fails, output_dir=str(new)).train()
    assert not (tmp_path / "above").exists()

    make(max_steps=1, save_steps=1).train()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match="no server"):
        make(reward_funcs=fails).train()
    assert contents(tmp_path / "run") == before

    for name in ("metrics.jsonl", "lock"):  # a model that somebody has put there
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match="no-such-checkpoint"):
        make().train(resume_from_checkpoint=str(tmp_path / "no-such-checkpoint"))
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_loss_given_in_python_is_the_loss(make) -> None:
    """Also one of the same name; a config with its name alone asks for it."""

    def times(factor: float):
        def own_loss(logprobs, old_logprobs, advantages, mask):
            return -factor * logprobs * advantages, {}

        return own_loss

    runs = [make(policy_loss=times(factor), max_steps=1).train() for factor in (1, 3)]
    one, three = (run.metrics["policy_loss"] for run in runs)
    assert three == pytest.approx(3 * one)
    assert one != 0
    with pytest.raises(ValueError, match="policy_loss python:gone"):
        make(policy_loss="python:gone")


def test_first_and_last_step_log_completions(make, tmp_path) -> None:
    make(max_steps=3, log_completions_steps=2).train()
    lines = read(tmp_path / "run" / "completions.jsonl")
    assert {line["step"] for line in lines} == {1, 2, 3}


@pytest.mark.fault(31, "a run is not resumed with another one")
def test_changed_reference_on_resume_is_refused(make) -> None:
    make(beta=0.1, save_steps=1).train()
    trainer = make(beta=0.1)
    with torch.no_grad():
        trainer.learner.reference.policy.model.lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="another reference"):
        trainer.train(resume_from_checkpoint=True)


def test_num_train_epochs_sets_total_steps(make) -> None:
    data = arithmetic().train_dataset.select(range(10))
    trainer = make(train_dataset=data, max_steps=-1, num_train_epochs=1.5)
    assert trainer.total_steps == 4  # 15 prompts, 4 at a time
    assert [trainer.sampler.order.rows(range(10 * e, 10 * e + 10)) for e in (0, 1)] != [[], []]


def test_own_optimizer_and_scheduler_are_used(make, tmp_path) -> None:
    model = make().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    make(model=model, optimizers=(optimizer, schedule)).train()
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["learning_rate"] == pytest.approx(0.005)


def test_evaluate_is_repeatable_and_leaves_training_unchanged(make, tmp_path) -> None:
    held_out = arithmetic().eval_dataset.select(range(9))
    make(output_dir=str(tmp_path / "plain"), max_steps=2).train()
    trainer = make(eval_dataset=held_out, eval_steps=1, max_steps=2, save_best=False)
    evaluated = trainer.evaluate()
    assert trainer.evaluate() == evaluated
    assert set(evaluated) >= {"eval_reward", "eval_rewards/digits/mean"}
    trainer.train()
    keys = without_times(dict.fromkeys(KEYS))
    ours, theirs = untimed(tmp_path / "run"), untimed(tmp_path / "plain")
    assert all("eval_reward" in line for line in ours)
    assert not (tmp_path / "run" / "best").exists()
    for line, other in zip(ours, theirs, strict=True):
        assert all(line[k] == other[k] for k in keys)


def test_failed_evaluation_keeps_metrics_of_step(make, tmp_path) -> None:
    def reward(prompts, completions, **_):
        if len(prompts) == 1:  # in the evaluation
            raise RuntimeError("not today")
        return [1.0] * len(prompts)

    held_out = arithmetic().eval_dataset.select(range(2))
    trainer = make(eval_dataset=held_out, eval_steps=2, reward_funcs=reward)
    with pytest.raises(ValueError, match="not today"):
        trainer.train()
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


MOMENTS = (
    *("on_start", "on_step_begin", "on_step_end", "on_evaluate", "on_step", "on_log", "on_save"),
    "on_end",
)


def recorder(seen: list[tuple[str, int]]) -> Callback:
    """A callback that notes each moment with its step."""

    def noting(moment):
        def note(self, trainer, *_) -> None:
            seen.append((moment.removeprefix("on_"), trainer.state.step))

        return note

    return type("Recorder", (Callback,), {moment: noting(moment) for moment in MOMENTS})()


def steps_of(directory) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.iterdir())


def test_moments_come_in_order(make) -> None:
    seen: list[tuple[str, int]] = []
    held_out = arithmetic().eval_dataset.select(range(4))
    make(
        callbacks=[recorder(seen)],
        eval_dataset=held_out,
        eval_steps=2,
        save_steps=3,
        logging_steps=2,
    ).train()
    assert seen == [
        ("start", 0),
        *[("step_begin", 0), ("step_end", 1), ("step", 1)],
        *[("step_begin", 1), ("step_end", 2), ("evaluate", 2), ("step", 2), ("log", 2)],
        *[("step_begin", 2), ("step_end", 3), ("step", 3), ("log", 3), ("save", 3)],
        ("end", 3),
    ]


def test_stop_leaves_final_and_checkpoint(make, tmp_path) -> None:
    def reward(completions, **columns):
        if trainer.state.step == 1:
            trainer.stop()
        return digits(completions, **columns)

    seen: list[tuple[str, int]] = []
    trainer = make(callbacks=[recorder(seen)], reward_funcs=reward, max_steps=5, save_steps=0)
    trainer.train()
    assert seen[-1] == ("end", 2)
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("moment", ["on_log", "on_save"])
def test_stop_takes_effect_in_the_same_step(make, moment) -> None:
    def stop(self, trainer, _) -> None:
        trainer.stop()

    ours = type("Ours", (Callback,), {moment: stop})()
    trainer = make(callbacks=[ours], max_steps=5, save_steps=2, logging_steps=2)
    trainer.train()
    assert trainer.state.step == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(Callback, "instantiate a class"), (PrinterCallback(), r"trainer\.stop\(\)")],
)
def test_wrong_callback_raises_when_trainer_is_made(make, wrong, said) -> None:
    with pytest.raises(ValueError, match=f"^callbacks .*{said}"):
        make(callbacks=[wrong])


def test_sequence_level_loss_with_length_weights_warns(make, caplog) -> None:
    make(importance_sampling_level="sequence", aggregation="sequence_mean")
    assert "long completions" not in caplog.text
    make(importance_sampling_level="sequence")
    assert "long completions more weight" in caplog.text


def test_trainer_of_a_notebook_has_no_file(make, monkeypatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    kind = type("Own", (PPOTrainer,), {"__module__": "__main__"})
    assert make(kind).resolved_args().trainer is None


def test_target_kl_with_a_loss_of_the_users_own(make) -> None:
    trainer = make(num_iterations=3, learning_rate=0.1, target_kl=1e-6)
    vars(trainer)["policy_loss"] = partial(
        lambda new, old, advantages, mask: (-new * advantages, {})
    )
    metrics = trainer.step()
    assert metrics["num_updates"] < 3


def test_run_lists_the_code_that_its_keys_name(make, tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(logprobs, old_logprobs, advantages, mask):\n    return -logprobs, {}\n"
    )
    trainer = make(policy_loss=f"{tmp_path}/own.py:loss")
    assert f"policy_loss: runs {tmp_path}/own.py:loss" in trainer.describe()
