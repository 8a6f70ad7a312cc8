"""Fine-tuning: its loss and its metrics, packing, adapters, resuming, and what is left behind."""

import copy
import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg import Callback
from rlhf_pg.checkpoint import export
from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.models.policy import disable_dropout
from rlhf_pg.report.run_files import read
from rlhf_pg.run.learner import Learner
from rlhf_pg.supervised import train_sft
from rlhf_pg.supervised.trainer import SupervisedTrainer, rows_of_step, token_budget
from tests.rewards.test_reward_model import letters
from tests.tiny import adapter, tiny_model


def upper(count=24):
    """The completion repeats the letter of its prompt, as often as the prompt says."""
    return Dataset.from_dict(
        {
            "prompt": [f"{chr(97 + i % 6)} " for i in range(count)],
            "completion": [chr(97 + i % 6) * (1 + i % 3) for i in range(count)],
        }
    )


def train(
    directory, model=None, data=None, held_out=None, peft_config=None, callbacks=(), **options
):
    defaults = {"max_steps": 4, "batch_size": 8, "learning_rate": 3e-3, "save_steps": 0}
    args = SFTConfig(output_dir=str(directory), **(defaults | options))
    model = tiny_model("llama", scale=0.05) if model is None else model
    data = upper() if data is None else data
    return train_sft(args, model, letters(), data, held_out, peft_config, callbacks)


def weights(directory):
    model = AutoModelForCausalLM.from_pretrained(directory / "final")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first, second):
    assert first.keys() == second.keys()
    return all(first[name].equal(second[name]) for name in first)


def test_held_out_metrics_are_means_over_learnt_tokens(tmp_path):
    """Held-out loss and accuracy by a loop in float64, whatever the batches they come in."""
    data = upper(7)
    metrics = train(tmp_path, data=data, held_out=data, max_steps=1, label_smoothing=0.3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final").double().eval()
    tokenizer, losses, right = letters(), [], []
    for row in data:
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [2]
        logits = model(torch.tensor([ids])).logits[0].detach()
        for place in range(len(row["prompt"]), len(ids)):
            said = torch.log_softmax(logits[place - 1], 0)
            losses.append(-said[ids[place]].item())
            right.append(said.argmax().item() == ids[place])
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert set(metrics) == {"eval_loss", "eval_mean_token_accuracy"}
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics


def gradient_of_a_step(directory, monkeypatch, model, data, **options):
    found = []
    accumulate = Learner.accumulate

    def kept(learner, *arguments):
        accumulate(learner, *arguments)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return {}

    monkeypatch.setattr(Learner, "accumulate", kept)
    defaults = {"dtype": "float64", "max_steps": 1, "max_grad_norm": 0.0, "batch_size": len(data)}
    train(directory, model, data, **(defaults | options))
    monkeypatch.undo()
    return found[0], read(directory / "metrics.jsonl")[0]["loss"]


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradient_of_a_step_is_that_of_a_loop_over_rows(tmp_path, monkeypatch, arch, smoothing):
    """(1 - s) of -log p(y) and s of the mean of -log p(v), over the labels of all rows; whether
    rows are packed or not (Bloom's mask counts columns).
    """
    shape = {"n_layer": 2, "n_head": 4} if arch == "bloom" else {}
    model = tiny_model(arch, scale=0.2, **shape).double()
    disable_dropout(model)
    before = copy.deepcopy(model)
    data = upper(5)
    own, loss = gradient_of_a_step(tmp_path, monkeypatch, model, data, label_smoothing=smoothing)
    tokenizer, losses = letters(), []
    for row in data:
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [2]
        log_p = before(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(len(row["prompt"]), len(ids)):
            said = log_p[place - 1]
            losses.append(-(1 - smoothing) * said[ids[place]] - smoothing * said.mean())
    mean = torch.stack(losses).mean()
    assert loss == pytest.approx(mean.item(), rel=1e-6)  # norms of Llama are in float32
    mean.backward()
    for name, parameter in before.named_parameters():
        assert own[name].allclose(parameter.grad, rtol=0, atol=1e-5), name


def test_rows_of_every_epoch_come_once():
    epochs = [[rows_of_step(11, 4, 7, 3 * epoch + i) for i in range(3)] for epoch in (0, 1)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 3]
    first, second = ([row for batch in epoch for row in batch] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second


def test_micro_batches_and_packing_change_no_step(tmp_path, monkeypatch):
    """22 rows in batches of 8: the last of an epoch has six."""
    runs = {"whole": {}, "one": {"micro_batch_tokens": 1}, "some": {"micro_batch_tokens": 20}}
    found = {}
    for name, options in runs.items():
        model = tiny_model("gpt2", scale=0.2)
        train(tmp_path / name, model, upper(22), dtype="float64", **options)
        losses = [line["loss"] for line in read(tmp_path / name / "metrics.jsonl")]
        found[name] = losses, weights(tmp_path / name)
    for losses, after in found.values():
        assert losses == pytest.approx(found["whole"][0], rel=1e-10)
        assert all(after[k].allclose(x, rtol=0, atol=1e-9) for k, x in found["whole"][1].items())


def test_automatic_micro_batch_holds_the_longest_row():
    runtime = SimpleNamespace(device=torch.device("cpu"))
    assert token_budget(SFTConfig(), 7, runtime) == 1024
    assert token_budget(SFTConfig(), 1000, runtime) == 4000
    assert token_budget(SFTConfig(), 9000, runtime) == 16384
    assert token_budget(SFTConfig(), 20000, runtime) == 20000
    assert token_budget(SFTConfig(micro_batch_tokens=5), 7, runtime) == 5


@pytest.mark.parametrize(
    ("key", "answer"),
    [("micro_batch_size", "micro_batch_tokens"), ("packing", "padding is never computed")],
)
def test_keys_of_the_past_are_answered(key, answer, capsys):
    with pytest.raises(SystemExit):
        parse(SFTConfig, [f"--{key}", "4"])
    assert answer in capsys.readouterr().err


def test_evaluation_that_fails_loses_neither_weights_nor_the_step(tmp_path, monkeypatch):
    saved = []

    def fails(trainer):
        saved.append(trainer.checkpointer.saved_step)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(SupervisedTrainer, "evaluate", fails)
        with pytest.raises(RuntimeError):
            train(tmp_path, held_out=upper(6), max_steps=3, save_steps=50)
    assert saved == [3]  # first, since an error of one process among several saves nothing
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    options = {"max_steps": 3, "save_steps": 50, "resume_from_checkpoint": "latest"}
    assert train(tmp_path, held_out=upper(6), **options)["eval_loss"] > 0


def test_finished_run_measures_again_what_it_has_measured(tmp_path):
    options = {"label_smoothing": 0.3, "held_out": upper(6), "save_steps": 50}
    metrics = train(tmp_path, **options)
    assert train(tmp_path, **options, resume_from_checkpoint="latest") == metrics


def test_gradients_that_stay_non_finite_end_the_run(tmp_path):
    model = tiny_model("llama", scale=0.05)
    model.lm_head.weight.data[3] = math.inf
    with pytest.raises(FloatingPointError, match="step 4"):
        train(tmp_path, model, max_steps=9)


def test_model_learns_completions(tmp_path):
    metrics = train(tmp_path, held_out=upper(6), max_steps=60)
    assert metrics["eval_loss"] < 0.5
    assert metrics["eval_mean_token_accuracy"] > 0.6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = tokenizer("c ", return_tensors="pt")
    said = model.generate(input_ids=ids["input_ids"], max_new_tokens=4, do_sample=False)
    assert said[0, 2] == ids["input_ids"][0, 0]


def test_adapter_is_saved_apart_and_merged(tmp_path):
    model = tiny_model("llama", scale=0.05)
    model.save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    options = {"use_peft": True, "lora_r": 2, "learning_rate": 1e-2, "save_merged": True}
    first = train(tmp_path / "run", tmp_path / "base", held_out=upper(6), **options)
    final = tmp_path / "run" / "final"
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), final
    )
    merged = AutoModelForCausalLM.from_pretrained(final / "merged")
    ids = torch.tensor([[5, 9, 4]])
    logits = [each(ids).logits for each in (model, adapted, merged)]
    assert logits[1].allclose(logits[2], atol=1e-4)
    assert not logits[0].allclose(logits[1], atol=1e-2)
    assert adapted.peft_config["default"].r == 2
    # An adapter is trained further.
    again = train(tmp_path / "again", final, held_out=upper(6), save_merged=True)
    assert (tmp_path / "again" / "final" / "merged").is_dir()
    assert again["eval_loss"] < first["eval_loss"]


def test_given_peft_config_is_trained_in_bfloat16(tmp_path):
    model = tiny_model("llama", scale=0.05)
    train(tmp_path, model, peft_config=adapter(), dtype="bfloat16", gradient_checkpointing=True)
    frozen = {p.dtype for n, p in model.named_parameters() if "lora" not in n}
    trained = {p.dtype for n, p in model.named_parameters() if "lora" in n}
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    assert any(p.any() for n, p in model.named_parameters() if "lora_B" in n)


RESUMED = {"save_steps": 3, "save_total_limit": None, "max_steps": 7, "batch_size": 4}


def copy_to_step(path, run, step):
    """A run as it was when it was killed after its checkpoint of a step."""
    shutil.copytree(path, run)
    shutil.rmtree(run / "final")
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("lora", [False, True])
def test_resumed_run_ends_with_same_weights_bit_for_bit(tmp_path, lora):
    options = RESUMED | ({"peft_config": adapter()} if lora else {})
    train(tmp_path / "whole", **options)
    assert (tmp_path / "whole" / "checkpoints" / "step-00000007").is_dir()  # the last
    copy_to_step(tmp_path / "whole", tmp_path / "partial", 3)
    train(tmp_path / "partial", **options | {"resume_from_checkpoint": "latest"})
    assert "resume_from_checkpoint: null" in (tmp_path / "partial" / "config.yaml").read_text()
    file = "final/" + ("adapter_model.safetensors" if lora else "model.safetensors")
    assert (tmp_path / "partial" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    lines = read(tmp_path / "partial" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 8)]


def test_signal_ends_run_after_its_step_with_a_checkpoint(tmp_path, monkeypatch):
    options = {"max_steps": 5, "save_steps": 0}
    train(tmp_path / "whole", **options)
    step, calls = SupervisedTrainer.step, []

    def signalled(trainer):
        calls.append(trainer)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer)

    monkeypatch.setattr(SupervisedTrainer, "step", signalled)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", **options)
    assert left.value.code == 128 + signal.SIGTERM
    train(tmp_path / "run", **options | {"resume_from_checkpoint": "latest"})
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with an adapter, after its checkpoint of step 3."""
    path = tmp_path_factory.mktemp("killed")
    train(path / "whole", **RESUMED, peft_config=adapter())
    copy_to_step(path / "whole", path / "run", 3)
    return path / "run"


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"batch_size": 2}, "batch_size"),
        ({"max_steps": 2}, "max_steps"),
        ({"data": upper(23)}, "train_dataset"),
        ({"model": tiny_model("llama", scale=0.1)}, "model"),
        ({"peft_config": adapter(lora_alpha=1)}, "lora_alpha"),
    ],
)
def test_resume_is_refused_with_other_data_model_or_keys(killed, other, key):
    options = RESUMED | {"peft_config": adapter(), "resume_from_checkpoint": "latest"}
    with pytest.raises(ValueError, match=f"{key}.*([Rr]esume with|raise)|another config: {key}"):
        train(killed, **options | other)


def test_run_leaves_config_metrics_and_report(tmp_path):
    metrics = train(tmp_path, held_out={"easy": upper(6), "a(b": upper(7)}, eval_steps=2)
    kinds = ("loss", "mean_token_accuracy")
    assert set(metrics) == {f"eval_{name}_{kind}" for name in ("easy", "a(b") for kind in kinds}
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_easy_loss" in line] == [2, 4]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= lines[0].keys()
    assert "dataset_fingerprint: null" not in (tmp_path / "config.yaml").read_text()
    assert "eval_easy_loss" in (tmp_path / "report.html").read_text()
    card = (tmp_path / "final" / "README.md").read_text()
    assert "## Data\n" in card
    assert "reinforcement" not in card
    assert "| step | loss | eval_easy_loss | " in card
    assert card.split("\n| 4 | ")[1].split(" | ")[1] == f"{metrics['eval_easy_loss']:.4g}"


class StopsAtTwo(Callback):
    def on_start(self, trainer):
        self.seen = []

    def on_step(self, trainer, metrics):
        self.seen.append(metrics["step"])
        if metrics["step"] == 2:
            trainer.stop()


def test_final_model_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    uploaded = []
    monkeypatch.setattr(export, "push", lambda path, args: uploaded.append(path))
    train(tmp_path, max_steps=1, push_to_hub=True)
    assert uploaded == [tmp_path / "final"]


def test_callback_stops_the_run_which_measures_its_last_weights(tmp_path):
    callback = StopsAtTwo()
    data = {"data": upper(6), "held_out": upper(6)}
    whole = train(tmp_path / "whole", max_steps=2, lr_scheduler_type="constant", **data)
    options = {"max_steps": 4, "eval_steps": 1, "lr_scheduler_type": "constant"}
    metrics = train(tmp_path / "run", callbacks=[callback], **options, **data)
    assert callback.seen == [1, 2]
    assert metrics == whole
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    with pytest.raises(ValueError, match=r"callbacks must be objects of rlhf_pg\.Callback"):
        train(tmp_path / "other", callbacks=[StopsAtTwo])


def test_precision_of_the_launcher_is_not_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="mixed_precision"):
        train(tmp_path, max_steps=1)


def test_options_of_loading_are_obeyed_or_refused(tmp_path):
    model = tiny_model("llama", scale=0.05)
    model.save_pretrained(tmp_path / "base")
    options = {"max_steps": 1, "model_init_kwargs": {"attention_dropout": 0.25}}
    train(tmp_path / "run", tmp_path / "base", **options)
    saved = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert saved["attention_dropout"] == 0.25
    with pytest.raises(ValueError, match=r"model_init_kwargs \(attention_dropout\) is for loading"):
        train(tmp_path / "object", model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_fingerprint": "00"}, "dataset_fingerprint 00"),
        ({"save_merged": True}, "save_merged is for a model with an adapter"),
        ({"use_peft": True, "peft_config": adapter()}, "there are two adapters"),
        ({"max_length": 3}, "train_dataset: row 0 has 4 tokens, more than the 3"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **options)
    assert not (tmp_path / "final").exists()


def test_missing_model_is_refused():
    with pytest.raises(ValueError, match=r"no model: give model=\.\.\. or the key model_name"):
        train_sft(SFTConfig(), train_dataset=upper())
