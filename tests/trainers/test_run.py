"""What a run does and leaves behind, and how it goes on after a stop."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg import Callback, GRPOConfig, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.checkpoint.atomic import verified
from rlhf_pg.config.parse import parse
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.untimed import untimed, without_times

TRAINERS = [GRPOTrainer, RLOOTrainer, ReinforceTrainer, PPOTrainer]


@pytest.mark.parametrize("trainer_type", TRAINERS)
def test_run_directory_holds_expected_files(make, trainer_type, tmp_path) -> None:
    trainer = make(trainer_type, beta=0.1, log_completions_steps=2, save_steps=2)
    trainer.train()
    run = tmp_path / "run"
    lines = read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(KEYS) <= set(lines[0])
    assert "rewards/digits/mean" in lines[0]
    absent = {key for key in KEYS if lines[0][key] is None}
    vanilla = {"clip_ratio/region_mean"} if trainer_type is ReinforceTrainer else set()
    assert absent == vanilla
    assert {"rewards/digits/std", "policy_loss", "entropy_coef"} <= set(lines[0])
    critic = {"value_loss", "explained_variance"}
    assert (critic <= set(lines[0])) == (trainer_type is PPOTrainer)
    assert (run / "final" / "critic").exists() == (trainer_type is PPOTrainer)
    completions = read(run / "completions.jsonl")
    assert [c["step"] for c in completions] == [2] * 16  # every completion of the step
    about = {"step", "prompt_index", "sample", "advantage", "truncated"}
    assert set(completions[0]) == about | {"prompt", "completion", "rewards/digits"}
    assert len(list((run / "tokens").iterdir())) == 3  # a record of every step
    saved = parse(trainer.config_type, ["--config", str(run / "config.yaml")])
    assert saved == trainer.resolved_args()
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000002"]

    model = AutoModelForCausalLM.from_pretrained(run / "final")
    trained = dict(trainer.model.named_parameters())
    assert all(p.equal(trained[name]) for name, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(run / "final").eos_token == "<eos>"


def test_trackers_log_every_logging_steps(make, tmp_path, monkeypatch) -> None:
    data = arithmetic().eval_dataset.select(range(2))
    trainer = make(logging_steps=4, max_steps=6, eval_steps=3, eval_dataset=data, save_best=False)
    seen = []
    monkeypatch.setattr(trainer.trackers, "log", lambda metrics: seen.append(metrics["step"]))
    trainer.train()
    assert seen == [3, 4, 6]  # 3 and 6 for their evaluation
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [*range(1, 7)]
    short = make(logging_steps=2, max_steps=3, output_dir=str(tmp_path / "short"))
    seen.clear()
    monkeypatch.setattr(short.trackers, "log", lambda metrics: seen.append(metrics["step"]))
    short.train()
    assert seen == [2, 3]  # and the last


def test_kl_is_null_without_reference_and_starts_at_zero(make, tmp_path) -> None:
    make().train()
    assert all(line["kl"] is None for line in read(tmp_path / "run" / "metrics.jsonl"))
    make(beta=0.1).train()
    kl = [line["kl"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[2] > 1e-6


@pytest.mark.parametrize(
    ("trainer_type", "options", "rest"),
    [
        (RLOOTrainer, {"aggregation": "token_mean"}, {}),
        (GRPOTrainer, {"beta": 0.5, "learning_rate": 0.1}, {"kl": 0.5}),
        (PPOTrainer, {"vf_coef": 0.3}, {"value_loss": 0.3}),
        (GRPOTrainer, {"entropy_coef": 0.2}, {"entropy": -0.2}),
    ],
)
def test_logged_loss_is_sum_of_logged_parts(make, trainer_type, options, rest, tmp_path) -> None:
    make(trainer_type, **options).train()
    for line in read(tmp_path / "run" / "metrics.jsonl"):
        parts = line["policy_loss"] + sum(line[name] * weight for name, weight in rest.items())
        assert line["loss"] == pytest.approx(parts, abs=1e-6)
        assert line["entropy_coef"] == options.get("entropy_coef", 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"importance_sampling_level": "sequence"}, "long completions more weight"),
        ({"importance_sampling_level": "sequence", "aggregation": "sequence_mean"}, None),
        ({}, None),
    ],
)
def test_sequence_level_loss_with_length_weights_warns(make, caplog, options, said) -> None:
    make(GRPOTrainer, **options)
    assert ("long completions" in caplog.text) == (said is not None)
    assert (said or "") in caplog.text


def test_step_metrics_match_samples(make) -> None:
    trainer = make()
    seen = {}
    collected = trainer.sampler.roll_out

    def roll_out(draws):
        seen["samples"] = collected(draws)
        return seen["samples"]

    trainer.sampler.roll_out = roll_out
    trainer.callbacks.append(Keep())
    trainer.train()
    metrics, rollout = trainer.callbacks[0].last, seen["samples"]
    lengths = rollout.completion_mask.sum(1).float()
    assert metrics["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert metrics["completions/clipped_ratio"] == rollout.truncated.float().mean().item()
    assert metrics["reward"] == pytest.approx(metrics["rewards/digits/mean"])
    assert metrics["num_tokens"] > 3 * 16 * 5


class Keep(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step(self, trainer, metrics) -> None:
        self.last = metrics
        self.events.append(f"step {metrics['step']}")

    def on_save(self, trainer, path) -> None:
        self.events.append(f"save {path.name}")

    def on_end(self, trainer) -> None:
        assert (Path(trainer.args.output_dir) / "final" / "config.json").exists()
        self.events.append("end")


def test_callbacks_fire_in_order(make) -> None:
    keep = Keep()
    make(callbacks=[keep], save_steps=2).train()
    assert keep.events == ["step 1", "step 2", "save step-00000002", "step 3", "end"]


@pytest.mark.parametrize("trainer_type", [ReinforceTrainer, PPOTrainer])
def test_resumed_run_matches_uninterrupted_run(make, trainer_type, tmp_path) -> None:
    """With dropout on, so that the random state matters, and a schedule that is not constant."""
    options = {"max_steps": 4, "save_steps": 2, "beta": 0.1, "warmup_steps": 1}
    if trainer_type is not ReinforceTrainer:
        options |= {"num_iterations": 2, "num_mini_batches": 2}
    options |= {"disable_dropout": False}
    whole = make(trainer_type, output_dir=str(tmp_path / "whole"), **options)
    dropout(whole)
    whole.train()

    part = make(trainer_type, output_dir=str(tmp_path / "part"), **options)
    dropout(part)
    part.total_steps = 2
    part.train()
    torch.manual_seed(999)
    rest = make(trainer_type, output_dir=str(tmp_path / "part"), **options)
    dropout(rest)
    rest.train(resume_from_checkpoint="latest")

    final = dict(rest.learner.module.named_parameters())
    assert all(p.equal(final[name]) for name, p in whole.learner.module.named_parameters())
    assert untimed(tmp_path / "part") == untimed(tmp_path / "whole")


def dropout(trainer) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    trainer.learner.policy.keep_dropout()


def test_dropout_is_off_by_default(make) -> None:
    trainer = make(max_steps=1)
    dropout(trainer)
    assert any(getattr(m, "attention_dropout", 0) > 0 for m in trainer.model.modules())
    fresh = make(model=trainer.model)
    assert all(getattr(m, "attention_dropout", 0) == 0 for m in fresh.model.modules())


class Breaks(Callback):
    def on_step(self, trainer, metrics) -> None:
        raise RuntimeError("not today")


def test_new_run_over_unfinished_run_is_refused(make) -> None:
    with pytest.raises(RuntimeError, match="not today"):
        make(save_steps=1, callbacks=[Breaks()]).train()
    with pytest.raises(ValueError, match=r"earlier run.*--resume_from_checkpoint latest"):
        make().train()


def test_finished_run_is_set_aside_with_checkpoints(make, tmp_path) -> None:
    for _ in range(2):
        make(save_steps=1).train()
    run = tmp_path / "run"
    assert verified(run / "earlier-1" / "checkpoints" / "step-00000003") is None
    assert verified(run / "checkpoints" / "step-00000003") is None


def test_earlier_runs_are_set_aside(make, tmp_path, capsys) -> None:
    for steps in (3, 2, 1):
        make(max_steps=steps).train()
    run = tmp_path / "run"
    for place, steps in {"earlier-1": 3, "earlier-2": 2, ".": 1}.items():
        assert len(read(run / place / "metrics.jsonl")) == steps
    assert (run / "earlier-1" / "final" / "config.json").exists()
    assert "had an earlier run or a model, which was moved to" in capsys.readouterr().out


def test_resume_without_checkpoint_raises(make, tmp_path) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint"):
        make().train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        make().train(resume_from_checkpoint=str(tmp_path))


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


def test_learning_rate_advances_once_per_step(make, tmp_path) -> None:
    make(max_steps=4, warmup_steps=2, num_iterations=2, num_mini_batches=2).train()
    rates = [line["learning_rate"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_own_optimizer_and_scheduler_are_used(make) -> None:
    model = make().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    keep = Keep()
    make(model=model, optimizers=(optimizer, schedule), callbacks=[keep]).train()
    assert keep.last["learning_rate"] == pytest.approx(0.005)


def test_evaluate_is_repeatable_and_leaves_training_unchanged(make, tmp_path) -> None:
    held_out = arithmetic().eval_dataset.select(range(20))
    plain = make(output_dir=str(tmp_path / "plain"))
    plain.train()
    trainer = make(eval_dataset=held_out, eval_steps=1)
    assert trainer.evaluate() == trainer.evaluate()
    assert set(trainer.evaluate()) >= {"eval_reward", "eval_rewards/digits/mean"}
    assert trainer.evaluate(temperature=0.0) != trainer.evaluate()
    trainer.train()
    keys = without_times(dict.fromkeys(KEYS))
    ours, theirs = untimed(tmp_path / "run"), untimed(tmp_path / "plain")
    assert all("eval_reward" in line for line in ours)
    for line, other in zip(ours, theirs, strict=True):
        assert all(line[k] == other[k] for k in keys)


def test_failed_evaluation_keeps_metrics_of_step(make, tmp_path) -> None:
    def reward(prompts, completions, **_):
        if len(prompts) == 1:  # in the evaluation
            raise RuntimeError("not today")
        return [1.0] * len(prompts)

    held_out = arithmetic().eval_dataset.select(range(20))
    trainer = make(eval_dataset=held_out, eval_steps=2, reward_funcs=reward)
    with pytest.raises(ValueError, match="not today"):
        trainer.train()
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_evaluate_without_dataset_raises(make) -> None:
    with pytest.raises(ValueError, match="eval_dataset"):
        make().evaluate()


def test_chat_prompts_reach_the_reward_as_messages(make, tmp_path) -> None:
    seen = {"prompts": [], "completions": [], "name": []}

    def reward(prompts, completions, completion_ids, name):
        seen["prompts"] += prompts
        seen["completions"] += completions
        seen["name"] += name
        return [1.0] * len(prompts)

    chats = [[{"role": "user", "content": f"{i}+1="}] for i in range(4)]
    columns = {"prompt": chats, "name": list("abcd")}
    data = Dataset.from_dict(columns)
    make(train_dataset=data, reward_funcs=reward, shuffle_dataset=False, max_steps=1).train()
    assert seen["prompts"] == [chat for chat in chats for _ in range(4)]
    assert seen["name"] == [name for name in "abcd" for _ in range(4)]
    assert all(c[0]["role"] == "assistant" for c in seen["completions"])
    shown = read(tmp_path / "run" / "metrics.jsonl")
    assert shown[0]["frac_reward_zero_std"] == 1.0


def test_gradient_checkpointing_changes_nothing(make, tmp_path) -> None:
    for name, on in (("off", False), ("on", True)):
        make(gradient_checkpointing=on, output_dir=str(tmp_path / name)).train()
    on, off = (untimed(tmp_path / name)[-1] for name in ("on", "off"))
    assert on["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-4)
    assert on["reward"] == off["reward"]
    args = make(gradient_checkpointing="offload").resolved_args()
    assert args.gradient_checkpointing is True  # there is nowhere to offload to


def test_bfloat16_run_saves_bfloat16_model(make, tmp_path) -> None:
    make(dtype="bfloat16", beta=0.1).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 for line in lines)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert weights.dtype == torch.bfloat16


def test_defaults_match_papers() -> None:
    assert GRPOConfig().beta == 0.0
    assert GRPOConfig().scale_rewards == "group"
    assert json.dumps(RLOOTrainer.config_type().beta) == "0.05"
