"""Fine-tuning: its loss and its metrics, packing, adapters, resuming, and what is left behind."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg.config import SFTConfig
from rlhf_pg.models.policy import disable_dropout
from rlhf_pg.report.run_files import read
from rlhf_pg.supervised import train_sft
from rlhf_pg.supervised.sft import Likelihood, check_packing, token_sums
from rlhf_pg.supervised.training import SupervisedTrainer, micro_batch_size, order
from tests.rewards.test_reward_model import letters
from tests.tiny import adapter, tiny_model

ROWS = [
    {"input_ids": [5, 9, 4, 7, 2], "labels": [-100, -100, 4, 7, 2]},
    {"input_ids": [8, 3, 2], "labels": [-100, 3, 2]},
    {"input_ids": [6, 6, 11, 12, 13, 14, 2], "labels": [-100, 6, 11, 12, 13, 14, 2]},
]


def upper(count=24):
    """The completion repeats the letter of its prompt, as often as the prompt says."""
    return Dataset.from_dict(
        {
            "prompt": [f"{chr(97 + i % 6)} " for i in range(count)],
            "completion": [chr(97 + i % 6) * (1 + i % 3) for i in range(count)],
        }
    )


def train(directory, model=None, data=None, held_out=None, peft_config=None, **options):
    defaults = {"max_steps": 4, "batch_size": 8, "learning_rate": 3e-3, "save_steps": 0}
    args = SFTConfig(output_dir=str(directory), **(defaults | options))
    model = tiny_model("llama", scale=0.05) if model is None else model
    data = upper() if data is None else data
    return train_sft(args, model, letters(), data, held_out, peft_config)


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


def test_token_sums_by_hand():
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(4), 0.0], [9.0, 9.0]]])
    sums = token_sums(logits, torch.tensor([[1, 1, 1]]))
    assert sums[0].tolist() == pytest.approx([math.log(4 / 3) + math.log(5), 1, 2])
    sums = token_sums(logits, torch.tensor([[1, -100, 0]]))
    assert sums[0].tolist() == pytest.approx([math.log(5 / 4), 1, 1])


def test_packing_is_refused_where_attention_mixes_examples(tmp_path):
    shape = {"n_layer": 2, "n_head": 4}  # Bloom's mask counts columns
    with pytest.raises(ValueError, match="packing: the attention of BloomForCausalLM mixes"):
        train(tmp_path, tiny_model("bloom", **shape), packing=True)
    assert not (tmp_path / "final").exists()


def likelihood(arch="llama", **options):
    model = tiny_model(arch, scale=0.2, dtype=torch.float64)
    disable_dropout(model)
    return Likelihood(model, 0, SFTConfig(dtype="float64", **options)).train()


def loss_and_gradient(objective, rows):
    loss = objective.loss(objective(objective.collate(rows)))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in objective.parameters()])


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3"])
def test_packed_loss_and_gradient_match_unpadded(arch):
    pairs = [
        loss_and_gradient(likelihood(arch, packing=packing), ROWS) for packing in (True, False)
    ]
    assert pairs[0][0] == pytest.approx(pairs[1][0], rel=1e-6)  # norms of Llama are in float32
    assert pairs[0][1].allclose(pairs[1][1], atol=1e-5)
    check_packing(tiny_model(arch), ROWS)


def test_smoothed_loss_by_loop():
    """(1 - s) of -log p(y) and s of the mean of -log p(v), over the labels of every row."""
    objective = likelihood(label_smoothing=0.2)
    expected = 0.0
    for row in ROWS:
        logits = objective.model(torch.tensor([row["input_ids"]])).logits[0]
        for t, label in enumerate(row["labels"][1:]):
            if label != -100:
                log_p = logits[t].log_softmax(0)
                expected -= (0.8 * log_p[label] + 0.2 * log_p.mean()).item()
    assert objective.loss(objective(objective.collate(ROWS))).item() == pytest.approx(
        expected, rel=1e-6
    )
    assert sum(map(objective.count, ROWS)) == 3 + 2 + 6


def test_precision_is_that_of_the_inputs_device():
    with torch.device("meta"):  # as offloaded weights are elsewhere
        objective = Likelihood(tiny_model("llama"), 0, SFTConfig(dtype="bfloat16"))
    assert objective.autocast({"input_ids": torch.zeros(1, 1)}).device == "cpu"


def test_rows_of_every_epoch_come_once():
    epochs = [[order(11, 4, 7, 3 * epoch + i) for i in range(3)] for epoch in (0, 1)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 3]
    first, second = ([row for batch in epoch for row in batch] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second


def test_micro_batches_and_packing_change_no_step(tmp_path):
    """22 rows in batches of 8: the last of an epoch has six."""
    runs = {"whole": {}, "one": {"micro_batch_size": 1}, "three": {"micro_batch_size": 3}}
    runs |= {"packed": {"packing": True, "micro_batch_size": 5}}
    found = {}
    for name, options in runs.items():
        model = tiny_model("gpt2", scale=0.2)
        train(tmp_path / name, model, upper(22), dtype="float64", **options)
        losses = [line["loss"] for line in read(tmp_path / name / "metrics.jsonl")]
        found[name] = losses, weights(tmp_path / name)
    for losses, after in found.values():
        assert losses == pytest.approx(found["whole"][0], rel=1e-10)
        assert all(after[k].allclose(x, rtol=0, atol=1e-9) for k, x in found["whole"][1].items())


def test_automatic_micro_batch_fits_tokens_and_logits():
    args = SFTConfig(batch_size=12)
    assert micro_batch_size(args, vocabulary=40, longest=7, world=1) == 12
    assert micro_batch_size(args, vocabulary=40, longest=7, world=5) == 3
    assert micro_batch_size(args, vocabulary=40, longest=16384 // 2, world=1) == 2
    assert micro_batch_size(args, vocabulary=2**24, longest=7, world=1) == 2  # 16 rows of logits
    assert micro_batch_size(args, vocabulary=2**30, longest=7, world=1) == 1


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
    metrics = train(tmp_path, held_out={"easy": upper(6), "same": upper(7)}, eval_steps=2)
    kinds = ("loss", "mean_token_accuracy")
    assert set(metrics) == {f"eval_{name}_{kind}" for name in ("easy", "same") for kind in kinds}
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_easy_loss" in line] == [2, 4]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= lines[0].keys()
    assert "dataset_fingerprint: null" not in (tmp_path / "config.yaml").read_text()
    assert "eval_easy_loss" in (tmp_path / "report.html").read_text()


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
