"""Training a reward model: the loss, what it learns, what it leaves behind, what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction

from rlhf_pg.config import RewardModelConfig
from rlhf_pg.rewards import RewardModel, bradley_terry_loss, train_reward_model
from rlhf_pg.rewards.bradley_terry import PairScorer, _accuracy, collate, tokenize_pairs
from tests.rewards.test_reward_model import TEMPLATE, by_hand, classifier, close, letters, says
from tests.tiny import tiny_model


def pairs(count=64):
    """The text with more of the letter "a" is preferred, whatever the prompt."""
    prompts = [f"{chr(98 + i % 20)} " for i in range(count)]
    return Dataset.from_dict(
        {
            "prompt": prompts,
            "chosen": ["a" * (2 + i % 3) + "bcd"[: i % 4] for i in range(count)],
            "rejected": ["a" * (i % 2) + "cdbe"[: 1 + i % 4] for i in range(count)],
        }
    )


def config(tmp_path, **options):
    defaults = {"max_steps": 30, "batch_size": 16, "learning_rate": 3e-3}
    return RewardModelConfig(output_dir=str(tmp_path), **(defaults | options))


def train(tmp_path, model=None, data=None, held_out=None, **options):
    model = classifier(scale=0.05) if model is None else model
    data = pairs() if data is None else data
    held_out = pairs(50) if held_out is None else held_out
    return train_reward_model(config(tmp_path, **options), model, letters(), data, held_out)


# --------------------------------------------------------------------------------------- the loss


def test_loss_matches_bradley_terry_formula():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([0.0, 0.5])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1.5))) / 2
    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(expected)
    assert bradley_terry_loss(chosen, chosen).item() == pytest.approx(math.log(2))


def test_loss_depends_only_on_difference_and_stays_finite():
    chosen, rejected = torch.tensor([2.0]), torch.tensor([0.5])
    shifted = bradley_terry_loss(chosen + 7, rejected + 7)
    assert shifted.item() == pytest.approx(bradley_terry_loss(chosen, rejected).item(), rel=1e-5)
    apart = torch.tensor([1000.0], requires_grad=True)
    loss = bradley_terry_loss(-apart, apart)
    loss.backward()
    assert (loss.item(), apart.grad.item()) == (2000, 2)


def test_gradient_is_probability_of_wrong_preference():
    chosen = torch.tensor([1.0, 0.0], requires_grad=True)
    rejected = torch.tensor([0.0, 3.0], requires_grad=True)
    bradley_terry_loss(chosen, rejected).backward()
    doubt = torch.sigmoid(torch.tensor([-1.0, 3.0])) / 2
    assert chosen.grad.allclose(-doubt)
    assert rejected.grad.allclose(doubt)


# -------------------------------------------------------------------------------- what it reads


@torch.no_grad()
def test_batch_is_scored_pair_by_pair():
    model = classifier("gpt2")
    rows = [{"chosen": [5, 9, 2], "rejected": [7]}, {"chosen": [0], "rejected": [4, 6, 2, 2]}]
    for pad in (0, 2):
        scores = PairScorer(model)(**collate(rows, pad))
        expected = [[by_hand(model, row[key]) for key in ("chosen", "rejected")] for row in rows]
        assert close(scores.flatten().tolist(), [x for pair in expected for x in pair])
        assert scores.shape == (2, 2)


@pytest.mark.parametrize("chat", [False, True])
def test_separate_prompt_matches_whole_texts(chat):
    tokenizer = letters(bos=True)
    tokenizer.chat_template = "<bos>" + TEMPLATE

    def text(content, role):
        return [says(content, role)] if chat else content

    prompt, chosen, rejected = text("ab", "user"), text("c", "assistant"), text("d", "assistant")
    apart = {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}
    whole = {"chosen": [prompt + chosen], "rejected": [prompt + rejected]}
    ids = [1, 23, 3, 4, 3, 5] if chat else [1, 3, 4, 5]
    for columns in (apart, whole):
        [pair] = tokenize_pairs(Dataset.from_dict(columns), tokenizer, None, "train_dataset")
        assert pair == {"chosen": ids, "rejected": [*ids[:-1], 6]}


# -------------------------------------------------------------------------------------- training


def test_training_learns_preference_and_reports_accuracy(tmp_path, capsys):
    metrics = train(tmp_path)
    assert metrics["eval_accuracy"] > 0.95
    assert metrics["eval_loss"] < 0.3
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert f"held-out accuracy {metrics['eval_accuracy']:.3f}" in capsys.readouterr().out
    judge = RewardModel(str(tmp_path / "final"))
    assert min(judge(["w ", "x "], ["aab", "aaa"])) > max(judge(["w ", "x "], ["b", "cd"]))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_saved_model_scores_as_in_training(tmp_path, arch):
    model = classifier(arch, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5)
    data = pairs(40)
    metrics = train(tmp_path, model, data, data, max_steps=3)
    judge = RewardModel(tmp_path / "final")
    chosen, rejected = (
        torch.tensor(judge(data["prompt"], data[key], ended=[True] * len(data)))
        for key in ("chosen", "rejected")
    )
    assert metrics["eval_accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    loss = bradley_terry_loss(chosen, rejected).item()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-3)


def test_tie_counts_as_wrong():
    scores = np.array([[1.0, 0.5], [0.5, 0.5], [0.0, 0.5], [-1.0, -2.0]])
    assert _accuracy(EvalPrediction(scores, None)) == {"accuracy": 0.5}


def test_training_disables_dropout(tmp_path):
    starts = []
    for rate in (0.0, 0.5):
        model = classifier("gpt2", resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
        starts.append(train(tmp_path, model, max_steps=5)["eval_loss"])
    assert starts[0] == starts[1]


def test_saved_model_has_standard_format(tmp_path):
    train(tmp_path, classifier(pad_token_id=None), max_steps=1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
    inputs = tokenizer(["ab", "abcd"], padding=True, return_tensors="pt")
    scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    judge = RewardModel(str(tmp_path / "final"))
    assert close(scores[:, 0].tolist(), judge(["ab", "abcd"], ["", ""]))


@pytest.mark.parametrize("given", ["argument", "key"])
def test_language_model_gets_seeded_head(tmp_path, given):
    start = tmp_path / "start"
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(start)
    letters().save_pretrained(start)
    heads = []
    for seed in (0, 0, 1):
        options = {"max_steps": 1, "learning_rate": 1e-30, "seed": seed}
        key = {"model_name_or_path": str(start)} if given == "key" else {}
        args = config(tmp_path / "run", **options, **key)
        path = None if given == "key" else start
        train_reward_model(args, path, train_dataset=pairs(), eval_dataset=pairs(8))
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
        heads.append(model.score.weight)
    assert heads[0].equal(heads[1])
    assert not heads[0].equal(heads[2])
    assert heads[0].dtype == torch.float32


# ------------------------------------------------------------------------------- what is refused


def broken(row=None, drop=(), **changes):
    """The pairs with other values in one row, or without a column."""
    rows = pairs(4).to_list()
    if row is not None:
        rows[row] |= changes
    return Dataset.from_list([{k: v for k, v in pair.items() if k not in drop} for pair in rows])


CHAT = Dataset.from_dict(
    {"chosen": [[says("a", "assistant")]], "rejected": [[says("b", "assistant")]]}
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken(drop=["chosen"]), r"no column 'chosen' \(it has prompt, rejected\)"),
        (broken(drop=["rejected"]), r"no column 'rejected' \(it has prompt, chosen\)"),
        (broken(2, chosen="b", rejected="b"), "chosen and rejected are the same in row 2"),
        (broken(3, rejected="b" * 31), "a text in row 3 has 34 tokens, more than the 32"),
        (broken(1, chosen="B"), "text in row 1 cannot be tokenized"),
        (broken(1, prompt=None), "row 1: prompt and completion must both be strings"),
        (broken(1, drop=["prompt"], chosen=""), "chosen in row 1 is empty"),
        (CHAT, "chosen in row 0 is a list of messages.*no chat_template"),
        (pairs(4).select([]), "give a datasets.Dataset with columns chosen and rejected"),
        (list(pairs(4)), "give a datasets.Dataset with columns chosen and rejected"),
        (None, "give a datasets.Dataset with columns chosen and rejected"),
    ],
)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_bad_pair_raises_with_dataset_and_row(tmp_path, name, data, message):
    datasets = {"train_dataset": pairs(4), "eval_dataset": pairs(4)} | {name: data}
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        train_reward_model(config(tmp_path, max_length=32), classifier(), letters(), **datasets)
    assert not (tmp_path / "final").exists()


def test_text_beyond_model_positions_raises(tmp_path):
    with pytest.raises(ValueError, match="row 0 has 65 tokens, more than the 64"):
        train(tmp_path, data=broken(0, chosen="b" * 62), max_length=100)
    train(tmp_path, data=broken(0, chosen="b" * 61), max_length=100, max_steps=1)


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        (None, letters(), "no model: give model"),
        ("./no/model", letters(), "there is no model directory ./no/model"),
        (classifier(num_labels=2), letters(), "the reward model has 2 outputs"),
        (classifier(), letters(pad_token=None), "no pad token"),
        (classifier(), None, "no tokenizer is saved"),
    ],
)
def test_untrainable_model_or_tokenizer_raises(tmp_path, model, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        train_reward_model(config(tmp_path), model, tokenizer, pairs(4), pairs(4))


def test_string_pairs_end_with_one_eos():
    tokenizer = letters()
    pairs = Dataset.from_list(
        [
            {"prompt": "a", "chosen": "b", "rejected": "c<eos>"},
            {"prompt": "", "chosen": "b", "rejected": "c"},
        ]
    )
    for data in (
        pairs,
        pairs.map(
            lambda row: {key: row["prompt"] + row[key] for key in ("chosen", "rejected")},
            remove_columns="prompt",
        ),
    ):
        first, second = tokenize_pairs(data, tokenizer, None, "train_dataset", eos=True)
        assert first == {"chosen": [3, 4, 2], "rejected": [3, 5, 2]}
        assert second == {"chosen": [4, 2], "rejected": [5, 2]}
        bare, _ = tokenize_pairs(data, tokenizer, None, "train_dataset")
        assert bare == {"chosen": [3, 4], "rejected": [3, 5, 2]}
