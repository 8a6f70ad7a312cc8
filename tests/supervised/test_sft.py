"""Fine-tuning: its loss and its metrics, packing, adapters, resuming, and what is left behind."""

import json
import math

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

from rlhf_pg.config import SFTConfig, dump
from rlhf_pg.report.run_files import read
from rlhf_pg.supervised import sft, train_sft, training
from rlhf_pg.supervised.sft import SFTTrainer, check_packing, pad_examples, token_sums
from rlhf_pg.supervised.training import check_resumed, micro_batch_size
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


# --------------------------------------------------------------------------------------- numbers


def test_held_out_metrics_are_means_over_learnt_tokens(tmp_path):
    """Held-out loss and accuracy by a loop in float64, whatever the batches they come in."""
    data = upper(7)
    metrics = train(tmp_path, data=data, held_out=data, max_steps=1)
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


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3"])
def test_packed_loss_and_gradient_match_unpadded(arch):
    losses, gradients = [], []
    for batch in (DataCollatorWithFlattening()(ROWS), pad_examples(ROWS, pad=0)):
        model = tiny_model(arch, scale=0.2)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0].allclose(gradients[1], atol=1e-5)
    check_packing(tiny_model(arch), ROWS)


def test_packing_is_refused_where_attention_mixes_examples(tmp_path):
    shape = {"n_layer": 2, "n_head": 4}  # Bloom's mask counts columns
    with pytest.raises(ValueError, match="packing: the attention of BloomForCausalLM mixes"):
        train(tmp_path, tiny_model("bloom", **shape), packing=True)
    assert not (tmp_path / "final").exists()


def test_training_does_not_depend_on_packing_or_micro_batches(tmp_path):
    runs = {
        "padded": {},
        "packed": {"packing": True},
        "small": {"micro_batch_size": 2},
        "packed-small": {"packing": True, "micro_batch_size": 4},
    }
    held_out = upper(7)
    found = {
        name: train(tmp_path / name, held_out=held_out, **options) for name, options in runs.items()
    }
    start = tiny_model("llama", scale=0.05).state_dict()
    expected = weights(tmp_path / "padded")
    assert not same(expected, start)
    for name in runs:
        after = weights(tmp_path / name)
        assert all(after[key].allclose(expected[key], atol=2e-4) for key in expected), name
        assert found[name]["eval_loss"] == pytest.approx(found["padded"]["eval_loss"], rel=1e-3)


def test_micro_batch_size_is_a_divisor_that_fits():
    assert micro_batch_size(12, "auto", 16384 // 5) == 4
    assert micro_batch_size(12, "auto", 10**6) == 1
    assert micro_batch_size(12, "auto", 1) == 12
    assert micro_batch_size(12, 6, 1) == 6
    assert micro_batch_size(12, 99, 1) == 12
    with pytest.raises(ValueError, match="micro_batch_size 5 does not divide the 12 examples"):
        micro_batch_size(12, 5, 1)
    assert micro_batch_size(12, "auto", 256, vocabulary=2**14) == 12
    assert micro_batch_size(12, "auto", 256, vocabulary=2**18) == 4  # 1 GiB in float32
    assert micro_batch_size(12, "auto", 256, vocabulary=2**30) == 1


def test_vocabulary_of_model_limits_micro_batch(tmp_path, monkeypatch):
    model = tiny_model("llama", scale=0.05)
    monkeypatch.setattr(training, "LOGITS", model.config.vocab_size * 8)  # two examples of four
    seen = []
    keep = pad_examples

    def noted(rows, pad):
        seen.append(len(rows))
        return keep(rows, pad)

    monkeypatch.setattr(sft, "pad_examples", noted)
    train(tmp_path, model, [{"prompt": "a ", "completion": "a"}] * 8, max_steps=1)
    assert set(seen) == {2}


# -------------------------------------------------------------------------------------- training


def test_model_learns_completions(tmp_path):
    metrics = train(tmp_path, held_out=upper(6), max_steps=60)
    assert metrics["eval_loss"] < 0.5
    assert metrics["eval_mean_token_accuracy"] > 0.6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = tokenizer("c ", return_tensors="pt")
    said = model.generate(input_ids=ids["input_ids"], max_new_tokens=4, do_sample=False)
    assert said[0, 2] == ids["input_ids"][0, 0]


def test_several_held_out_sets_are_measured_by_name(tmp_path):
    metrics = train(tmp_path, held_out={"easy": upper(6), "same": upper(7)}, max_steps=1)
    assert set(metrics) == {
        f"eval_{name}_{metric}"
        for name in ("easy", "same")
        for metric in ("loss", "mean_token_accuracy")
    }


def test_run_leaves_config_and_metrics_of_steps(tmp_path):
    train(tmp_path, held_out=upper(6), logging_steps=1, eval_steps=2)
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 4]
    config = (tmp_path / "config.yaml").read_text()
    assert "algorithm: sft" in config
    assert "dataset_fingerprint: null" not in config


def test_adapter_is_saved_apart_and_merged(tmp_path):
    model = tiny_model("llama", scale=0.05)
    model.save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    options = {"use_peft": True, "lora_r": 2, "learning_rate": 1e-2, "save_merged": True}
    train(tmp_path / "run", tmp_path / "base", **options)
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
    again = train(tmp_path / "again", final, held_out=upper(6))
    assert (
        again["eval_loss"]
        < train(tmp_path / "x", final, held_out=upper(6), max_steps=1)["eval_loss"]
    )


def test_given_peft_config_is_trained_in_bfloat16(tmp_path):
    model = tiny_model("llama", scale=0.05)
    train(tmp_path, model, peft_config=adapter(), dtype="bfloat16", gradient_checkpointing=True)
    frozen = {p.dtype for n, p in model.named_parameters() if "lora" not in n}
    trained = {p.dtype for n, p in model.named_parameters() if "lora" in n}
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    assert any(p.any() for n, p in model.named_parameters() if "lora_B" in n)


def test_gradient_checkpointing_does_not_change_training(tmp_path):
    for name, recompute in (("plain", False), ("recomputed", True), ("offloaded", "offload")):
        train(tmp_path / name, gradient_checkpointing=recompute)
        assert same(weights(tmp_path / "plain"), weights(tmp_path / name))


@pytest.mark.parametrize("lora", [False, True])
def test_resumed_run_ends_with_same_weights_bit_for_bit(tmp_path, lora):
    options = {"save_steps": 3, "save_total_limit": None, "max_steps": 7, "batch_size": 4}
    options |= {"logging_steps": 1}
    options |= {"peft_config": adapter()} if lora else {}
    train(tmp_path / "whole", **options)
    partial = tmp_path / "partial"
    # The schedule is that of the whole run, as it is where a run is killed.
    train(partial, **options)
    for name in ("checkpoint-6", "checkpoint-7"):
        (partial / name).rename(tmp_path / name)
    (partial / "final").rename(tmp_path / "done")
    train(partial, **options | {"resume_from_checkpoint": "latest"})
    file = "final/" + ("adapter_model.safetensors" if lora else "model.safetensors")
    assert (partial / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert [line["step"] for line in read(partial / "metrics.jsonl") if "loss" in line] == [
        *range(1, 8)
    ]


def test_resume_is_refused_with_other_data_or_keys(tmp_path):
    options = {"save_steps": 1, "max_steps": 2}
    train(tmp_path, **options)
    latest = {"resume_from_checkpoint": "latest"}
    with pytest.raises(ValueError, match="checkpoint-2 was saved by a run with batch_size 8"):
        train(tmp_path, **options | latest | {"batch_size": 4})
    with pytest.raises(ValueError, match=r"checkpoint-2 was saved .* with dataset_fingerprint"):
        train(tmp_path, data=upper(23), **options | latest)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        train(tmp_path, **options | {"resume_from_checkpoint": str(tmp_path / "final")})
    with pytest.raises(ValueError, match="new has no complete checkpoint"):
        train(tmp_path / "new", **options | latest)


@pytest.mark.parametrize(
    "other", [{"dataset_train_split": "other"}, {"prompt_template": "{prompt}!"}]
)
def test_dataset_by_name_is_resumed_on_its_own_data_only(tmp_path, other):
    checkpoint = tmp_path / "checkpoint-1"
    options = {"output_dir": str(tmp_path), "dataset_name": "a/b", "max_steps": 2}
    dump(SFTConfig(**options), tmp_path / "config.yaml")
    check_resumed(checkpoint, SFTConfig(**options), None)
    with pytest.raises(
        ValueError, match=f"checkpoint-1 was saved by a run with {next(iter(other))}"
    ):
        check_resumed(checkpoint, SFTConfig(**options, **other), None)


def test_checkpoint_of_elsewhere_sets_earlier_run_aside(tmp_path):
    options = {"save_steps": 1, "save_total_limit": None, "logging_steps": 1}
    train(tmp_path / "first", max_steps=2, **options)
    train(tmp_path / "second", max_steps=3, **options)
    train(
        tmp_path / "second",
        max_steps=2,
        resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"),
        **options,
    )
    assert [path.name for path in tmp_path.glob("second/checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "second" / "earlier-1" / "checkpoint-3").exists()
    steps = [line["step"] for line in read(tmp_path / "second" / "metrics.jsonl")]
    assert set(steps) == {2}


def test_adapter_is_resumed_on_its_own_model_only(tmp_path, caplog):
    options = {"save_steps": 1, "max_steps": 2, "peft_config": adapter()}
    train(tmp_path, **options)
    options["resume_from_checkpoint"] = "latest"
    for other in (
        {"model": tiny_model("llama", scale=0.1)},
        {"peft_config": adapter(lora_alpha=1)},
        {"peft_config": adapter(r=1)},
        {"peft_config": None},
    ):
        with pytest.raises(ValueError, match="checkpoint-2 was saved by a run with another model"):
            train(tmp_path, **options | other)
    train(tmp_path, **options | {"max_steps": 3, "num_train_epochs": 2})
    assert "is resumed with other settings: max_steps was 2 and is 3" in caplog.text


@pytest.mark.parametrize("asked", ["fp16", "bf16"])
def test_precision_of_the_launcher_is_not_ignored(tmp_path, monkeypatch, asked):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    with pytest.raises(ValueError, match="mixed_precision"):
        train(tmp_path, max_steps=1)


def test_earlier_checkpoints_are_set_aside(tmp_path):
    train(tmp_path, save_steps=2, max_steps=2)
    train(tmp_path, max_steps=1)
    assert (tmp_path / "earlier-1" / "checkpoint-2" / "trainer_state.json").exists()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_options_of_loading_are_obeyed_or_refused(tmp_path):
    model = tiny_model("llama", scale=0.05)
    model.save_pretrained(tmp_path / "base")
    options = {"max_steps": 1, "model_init_kwargs": {"attention_dropout": 0.25}}
    train(tmp_path / "run", tmp_path / "base", **options)
    saved = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert saved["attention_dropout"] == 0.25
    train(tmp_path / "eager", model, max_steps=1, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"model_init_kwargs \(attention_dropout\) is for loading"):
        train(tmp_path / "object", model, **options)


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset_fingerprint": "00"},
            "dataset_fingerprint is 00: the data or the tokenizer differ",
        ),
        ({"save_merged": True}, "save_merged is for a model with an adapter"),
        ({"use_peft": True, "peft_config": adapter()}, "there are two adapters"),
        ({"max_length": 3}, "train_dataset: row 0 has 4 tokens, more than the 3"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **options)
    assert not (tmp_path / "final").exists()


def test_split_weights_are_not_merged(tmp_path, monkeypatch):
    def sharded(**options):
        trainer = SFTTrainer(**options)
        trainer.is_fsdp_enabled = True
        return trainer

    monkeypatch.setattr("rlhf_pg.supervised.sft.SFTTrainer", sharded)
    with pytest.raises(ValueError, match="save_merged needs whole weights, which FSDP"):
        train(tmp_path, peft_config=adapter(), save_merged=True)


def test_missing_model_is_refused():
    with pytest.raises(ValueError, match=r"no model: give model=\.\.\. or the key model_name"):
        train_sft(SFTConfig(), train_dataset=upper())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps must be at least 1, or -1"),
        ({"lora_dropout": 0.1, "use_peft": True}, "lora_dropout needs disable_dropout: false"),
        ({"assistant_only_loss": True, "completion_only_loss": False}, "assistant_only_loss"),
    ],
)
def test_config_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig(**options)
