"""Training a reward model: the loss, what it learns, what it leaves behind, what is refused."""

import copy
import json
import math

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_pg.config import RewardModelConfig
from rlhf_pg.data import Batch
from rlhf_pg.rewards import RewardModel, train_reward_model
from rlhf_pg.rewards.reward_model import sequence_scores
from rlhf_pg.run.learner import Learner
from rlhf_pg.supervised.bradley_terry import (
    Pair,
    PairScorer,
    RewardModelTrainer,
    _load,
    bradley_terry_loss,
    calibration_error,
    centering_loss,
    load_pairs,
    row_of,
)
from tests.rewards.test_reward_model import TEMPLATE, by_hand, classifier, close, letters, says
from tests.supervised.test_sft import copy_to_step
from tests.tiny import adapter, stir, tiny_model


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
    defaults = {"max_steps": 30, "batch_size": 16, "learning_rate": 3e-3, "save_steps": 0}
    return RewardModelConfig(output_dir=str(tmp_path), **(defaults | options))


def tokenized(data, tokenizer, **options):
    args = RewardModelConfig(**options)
    loaded = load_pairs(data, args, tokenizer, args.max_length, "train_dataset")
    return [(list(pair.chosen), list(pair.rejected)) for pair in loaded]


def train(tmp_path, model=None, data=None, held_out=None, peft_config=None, **options):
    model = classifier(scale=0.05) if model is None else model
    data = pairs() if data is None else data
    held_out = pairs(50) if held_out is None else held_out
    args = config(tmp_path, **options)
    return train_reward_model(args, model, letters(), data, held_out, peft_config)


def test_loss_matches_bradley_terry_formula():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([0.0, 0.5])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1.5))) / 2
    assert bradley_terry_loss(chosen, rejected).item() == pytest.approx(expected)
    assert bradley_terry_loss(chosen, chosen).item() == pytest.approx(math.log(2))


def test_gradient_is_probability_of_wrong_preference():
    chosen = torch.tensor([1.0, 0.0], requires_grad=True)
    rejected = torch.tensor([0.0, 3.0], requires_grad=True)
    bradley_terry_loss(chosen, rejected).backward()
    doubt = torch.sigmoid(torch.tensor([-1.0, 3.0])) / 2
    assert chosen.grad.allclose(-doubt)
    assert rejected.grad.allclose(doubt)


def test_margin_is_subtracted_from_difference():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([0.0, 0.5])
    margin = torch.tensor([0.5, -2.0])
    expected = (math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(-0.5))) / 2
    assert bradley_terry_loss(chosen, rejected, margin).item() == pytest.approx(expected)


def test_centering_is_mean_squared_sum():
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.5])
    assert centering_loss(chosen, rejected).item() == pytest.approx((9 + 0.25) / 2)


def scored(model, rows):
    with torch.no_grad():
        return PairScorer(model)(Batch.of([row_of(pair, i) for i, pair in enumerate(rows)]))


APART = [
    Pair([5, 9, 2], [7]),  # nothing in common
    Pair([0], [4, 6, 2, 2]),
    Pair([3, 4, 5, 2], [3, 4, 6]),  # two tokens in common
    Pair([3, 4], [3, 4, 6, 2]),  # one text begins with the other
    Pair([3, 4, 6, 2], [3]),
]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_each_text_of_a_pair_is_scored_as_alone(arch):
    model = classifier(arch)
    scores = scored(model, APART)
    for own, other in zip(scores, zip(*APART, strict=True), strict=False):
        assert close(own.tolist(), [by_hand(model, ids) for ids in other])


def test_gradient_of_a_step_is_that_of_the_losses_by_hand(tmp_path, monkeypatch):
    """Of pairs in micro-batches of one, with margins and centring."""
    model = classifier("gpt2", scale=0.2).double()
    data = pairs(6).add_column("margin", [0.5, -0.25, 0.0, 1.0, 0.0, 0.75])
    args = config(
        tmp_path,
        dtype="float64",
        center_rewards_coefficient=0.1,
        micro_batch_tokens=1,
        batch_size=6,
        max_grad_norm=0.0,
        max_steps=1,
    )
    found = []
    step = Learner.accumulate

    def kept(learner, *arguments):
        step(learner, *arguments)
        found.append([p.grad.clone() for p in model.parameters()])
        return {}

    monkeypatch.setattr(Learner, "accumulate", kept)
    loaded = load_pairs(data, args, letters(), None, "data")
    before = copy.deepcopy(model)
    train_reward_model(args, model, letters(), data, pairs(8))
    chosen, rejected = (
        torch.stack(
            [
                sequence_scores(before, torch.tensor([list(ids)]), torch.ones(1, len(ids)))[0]
                for ids in texts
            ]
        )
        for texts in ([pair.chosen for pair in loaded], [pair.rejected for pair in loaded])
    )
    margins = torch.tensor(data["margin"], dtype=torch.float64)
    loss = bradley_terry_loss(chosen, rejected, margins) + 0.1 * centering_loss(chosen, rejected)
    loss.backward()
    for own, parameter in zip(found[0], before.parameters(), strict=True):
        assert own.allclose(parameter.grad, rtol=0, atol=1e-9)


def test_calibration_error_by_hand():
    """Confidences 0.6, 0.6, 0.6 (one wrong), 0.9 (right) and 0.95 (wrong), in bins of 0.05."""
    confidence = torch.tensor([0.6, 0.6, 0.6, 0.9, 0.96], dtype=torch.float64) + 1e-9
    apart = torch.logit(confidence) * torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    error = 3 / 5 * (2 / 3 - 0.6) + 1 / 5 * (1 - 0.9) + 1 / 5 * 0.96
    assert calibration_error(apart, torch.zeros(5)) == pytest.approx(error)
    # In one bin: three of five are right, at a mean confidence of 0.732.
    assert calibration_error(apart, torch.zeros(5), bins=1) == pytest.approx(0.732 - 0.6)


def test_calibration_error_of_ties_and_certainty():
    far = torch.tensor([1000.0, 1000.0])
    assert calibration_error(torch.zeros(3), torch.zeros(3)) == 0
    assert calibration_error(far, -far) == 0
    assert calibration_error(-far, far) == 1
    assert math.isnan(calibration_error(far * math.nan, far))


def test_tie_counts_as_wrong():
    numbers = torch.tensor([[1.0, 0.5, 0], [0.5, 0.5, 0], [0.0, 0.5, 0], [-1.0, -2.0, 0]])
    assert RewardModelTrainer.summarize(None, numbers.double())["accuracy"] == 0.5


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
        [pair] = tokenized(Dataset.from_dict(columns), tokenizer, append_eos=False)
        assert pair == (ids, [*ids[:-1], 6])


def chats():
    tokenizer = letters("abcdefghijklmnopqrstuvwxyz .")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


WHOLE = {
    "chosen": [says("ab"), says("c", "assistant")],
    "rejected": [says("ab"), says("d", "assistant")],
}


@pytest.mark.parametrize(
    "pair",
    [
        WHOLE,
        WHOLE | {"prompt": "ab"},  # once more, as text
        WHOLE | {"prompt": [says("ab")]},
        {"prompt": [says("ab")], "chosen": "c", "rejected": "d"},
        {"prompt": "ab"} | {key: WHOLE[key][1:] for key in WHOLE},
        {"prompt": [says("ab")]} | {key: WHOLE[key][1:] for key in WHOLE},
    ],
)
def test_implicit_and_mixed_prompts_give_same_chat(pair):
    expected = ([23, 3, 4, 3, 5], [23, 3, 4, 3, 6])
    assert tokenized(Dataset.from_list([pair]), chats()) == [expected]


@pytest.mark.parametrize("where", ["both", "text", "prompt"])
def test_system_message_beside_repeated_prompt_is_there_once(where):
    system = [says("z", "system")]
    prompt = [*(system if where != "text" else []), says("ab")]
    whole = {key: [*(system if where != "prompt" else []), *WHOLE[key]] for key in WHOLE}
    [pair] = tokenized(Dataset.from_list([{"prompt": prompt} | whole]), chats())
    assert pair == ([21, 28, 23, 3, 4, 3, 5], [21, 28, 23, 3, 4, 3, 6])


def test_system_prompt_stands_in_front_of_conversations():
    [pair] = tokenized(Dataset.from_list([WHOLE]), chats(), system_prompt="z")
    assert pair == ([21, 28, 23, 3, 4, 3, 5], [21, 28, 23, 3, 4, 3, 6])


def test_adapter_is_merged_into_plain_classifier(tmp_path):
    model = classifier(scale=0.05)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"use_peft": True, "lora_r": 4, "learning_rate": 1e-2, "dtype": "bfloat16"}
    metrics = train(tmp_path, model, **options)
    assert metrics["eval_accuracy"] > 0.95
    assert not list((tmp_path / "final").glob("adapter*"))
    assert "library_name: transformers" in (tmp_path / "final" / "README.md").read_text()
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    changed = {
        name
        for name, tensor in after.state_dict().items()
        if not tensor.float().allclose(before[name], atol=2e-2 * before[name].abs().max())
    }
    assert "score.weight" in changed
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)
    data = pairs(50)
    judge = RewardModel(tmp_path / "final")
    better, worse = (judge(data["prompt"], data[key]) for key in ("chosen", "rejected"))
    right = sum(a > b for a, b in zip(better, worse, strict=True)) / 50
    assert right == pytest.approx(metrics["eval_accuracy"], abs=0.05)


def test_adapter_of_language_model_gets_head_on_merged_weights(tmp_path):
    """What SFT with LoRA leaves is a start for a reward model."""
    base = tiny_model("llama", scale=0.05)
    base.save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = stir(get_peft_model(policy, adapter()))
    adapted.save_pretrained(tmp_path / "adapter")
    letters().save_pretrained(tmp_path / "adapter")
    loaded = _load(tmp_path / "adapter", config(tmp_path / "run").on("cpu"))
    whole = adapted.merge_and_unload()
    ids = torch.tensor([[5, 9, 4]])
    hidden = [m.base_model(ids).last_hidden_state for m in (loaded, whole, base)]
    assert hidden[0].allclose(hidden[1], atol=1e-5)
    assert not hidden[0].allclose(hidden[2], atol=1e-2)
    args = config(tmp_path / "run", max_steps=1)
    train_reward_model(args, tmp_path / "adapter", None, pairs(), pairs(8))
    get_peft_model(classifier(), adapter(task_type="SEQ_CLS")).save_pretrained(tmp_path / "x")
    with pytest.raises(ValueError, match="is of kind SEQ_CLS"):
        _load(tmp_path / "x", config(tmp_path / "run").on("cpu"))


def test_options_of_loading_are_obeyed_or_refused(tmp_path):
    classifier().save_pretrained(tmp_path / "base")
    letters().save_pretrained(tmp_path / "base")
    options = {"model_init_kwargs": {"attention_dropout": 0.25}, "attn_implementation": "eager"}
    loaded = _load(tmp_path / "base", config(tmp_path / "run", **options).on("cpu"))
    assert loaded.config.attention_dropout == 0.25
    assert loaded.config._attn_implementation == "eager"
    args = config(tmp_path / "run", model_init_kwargs={"attention_dropuot": 0.25})
    with pytest.raises(ValueError, match="did you mean 'attention_dropout'"):
        train_reward_model(args, tmp_path / "base", None, pairs(), pairs(8))
    with pytest.raises(ValueError, match=r"model_init_kwargs \(attention_dropuot\) is for loading"):
        train_reward_model(args, classifier(), letters(), pairs(), pairs(8))


def test_resumed_run_ends_with_same_weights_bit_for_bit(tmp_path):
    options = {"save_steps": 3, "save_total_limit": None, "max_steps": 5, "batch_size": 4}
    train(tmp_path / "whole", peft_config=adapter(), **options)
    copy_to_step(tmp_path / "whole", tmp_path / "partial", 3)
    options |= {"resume_from_checkpoint": "latest"}
    train(tmp_path / "partial", peft_config=adapter(), **options)
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("whole", "partial")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_training_learns_preference_and_reports_accuracy(tmp_path, capsys):
    metrics = train(tmp_path)
    assert metrics["eval_accuracy"] > 0.95
    assert metrics["eval_loss"] < 0.3
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert f"held out: accuracy {metrics['eval_accuracy']:.3f}" in capsys.readouterr().out
    judge = RewardModel(str(tmp_path / "final"))
    assert min(judge(["w ", "x "], ["aab", "aaa"])) > max(judge(["w ", "x "], ["b", "cd"]))


def test_saved_model_scores_as_in_training(tmp_path):
    model = classifier("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    data = pairs(40).add_column("margin", [0.5] * 40)
    metrics = train(tmp_path, model, data, data, max_steps=3)
    judge = RewardModel(tmp_path / "final")
    chosen, rejected = (
        torch.tensor(judge(data["prompt"], data[key], ended=[True] * len(data)))
        for key in ("chosen", "rejected")
    )
    assert metrics["eval_accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    loss = bradley_terry_loss(chosen, rejected, torch.full((40,), 0.5)).item()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-3)
    error = calibration_error(chosen, rejected)
    assert metrics["eval_calibration_error"] == pytest.approx(error, rel=1e-2)


def test_training_disables_dropout(tmp_path):
    starts = []
    for rate in (0.0, 0.5):
        model = classifier("gpt2", resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
        starts.append(train(tmp_path, model, max_steps=2)["eval_loss"])
    assert starts[0] == starts[1]


def test_given_classifier_is_trained_in_float32_and_saved_in_standard_format(tmp_path):
    given = classifier(pad_token_id=None, dtype=torch.bfloat16)
    train(tmp_path, given, max_steps=1)
    assert {p.dtype for p in given.parameters()} == {torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
    inputs = tokenizer(["ab", "abcd"], padding=True, return_tensors="pt")
    scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    judge = RewardModel(str(tmp_path / "final"))
    assert close(scores[:, 0].tolist(), judge(["ab", "abcd"], ["", ""]))


def test_language_model_gets_seeded_head(tmp_path):
    start = tmp_path / "start"
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(start)
    letters().save_pretrained(start)
    heads = []
    for seed in (0, 0, 1):
        args = config(tmp_path / "run", max_steps=1, learning_rate=1e-30, seed=seed)
        train_reward_model(args, start, train_dataset=pairs())
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
        heads.append(model.score.weight)
    assert heads[0].equal(heads[1])
    assert not heads[0].equal(heads[2])
    assert heads[0].dtype == torch.float32


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
        (broken(2, chosen="b", rejected="b"), "chosen and rejected have the same tokens in row 2"),
        (broken(3, rejected="b" * 31), "a text in row 3 has 34 tokens, more than the 32"),
        (broken(1, chosen="B"), "text in row 1 cannot be tokenized"),
        (broken(1, prompt=None), "row 1: prompt and completion must both be strings"),
        (broken(1, drop=["prompt"], chosen=""), "chosen in row 1 is empty"),
        (broken().add_column("margin", [1.0, 0.0, None, 0.0]), "margin in row 2 must be a finite"),
        (CHAT, "chosen in row 0 is a list of messages.*no chat_template"),
        (pairs(4).select([]), "it has no rows"),
        (["ab"], "give a datasets.Dataset or a list of dicts"),
        (iter(pairs(4)), "give a datasets.Dataset"),
    ],
)
def test_bad_pair_raises_with_dataset_and_row(tmp_path, data, message):
    args = config(tmp_path, max_length=32), classifier(), letters()
    with pytest.raises(ValueError, match=f"^train_dataset: .*{message}"):
        train_reward_model(*args, data, pairs(4))
    with pytest.raises(ValueError, match=f"^eval_dataset: .*{message}"):
        train_reward_model(*args, pairs(4), data)
    assert not (tmp_path / "final").exists()


def test_held_out_pairs_are_optional(tmp_path, caplog):
    args = config(tmp_path / "a", max_steps=1)
    assert train_reward_model(args, classifier(), letters(), pairs(4)) == {}
    with pytest.raises(ValueError, match=r"^train_dataset: .*give a datasets.Dataset"):
        train_reward_model(args, classifier(), letters())
    pairs(40).to_json(tmp_path / "pairs.jsonl")
    args = config(tmp_path / "b", max_steps=1, dataset_name=str(tmp_path / "pairs.jsonl"))
    assert "eval_accuracy" in train_reward_model(args, classifier(), letters())
    assert "dataset_test_split" in caplog.text


def test_text_beyond_model_positions_raises(tmp_path):
    with pytest.raises(ValueError, match="row 0 has 65 tokens, more than the 64"):
        train(tmp_path, data=broken(0, chosen="b" * 62), max_length=100)


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        (None, letters(), "no model: give model"),
        ("./no/model", letters(), "there is no model directory ./no/model"),
        (classifier(num_labels=2), letters(), "the reward model has 2 outputs"),
        (classifier(), letters(pad_token=None), "no pad token"),
        (classifier(), None, "no tokenizer was saved"),
    ],
)
def test_untrainable_model_or_tokenizer_raises(tmp_path, model, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        train_reward_model(config(tmp_path), model, tokenizer, pairs(4), pairs(4))


def test_long_pairs_are_dropped_on_demand(capsys):
    data, options = broken(0, chosen="b" * 62), {"long_examples": "drop"}
    assert len(tokenized(data, letters(), max_length=64, **options)) == 3
    assert "train_dataset: 1 of 4 pairs are too long: left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="each of its 4 pairs is too long: raise max_length"):
        tokenized(data, letters(), max_length=1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_4bit": True, "use_peft": True}, "load_in_4bit is not for .*merged"),
        ({"save_merged": True, "use_peft": True}, "save_merged is not needed"),
    ],
)
def test_config_that_no_reward_model_can_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RewardModelConfig(**options)


def test_string_pairs_end_with_one_eos():
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c<eos>"},
        {"prompt": "", "chosen": "b", "rejected": "c"},
    ]
    expected = [([3, 4, 2], [3, 5, 2]), ([4, 2], [5, 2])]
    assert tokenized(Dataset.from_list(rows), letters()) == expected
    bare, _ = tokenized(Dataset.from_list(rows), letters(), append_eos=False)
    assert bare == ([3, 4], [3, 5, 2])


def text(ids):
    return letters().decode(ids).replace(" ", "")


def test_prompt_that_texts_repeat_is_read_once():
    whole = [{"prompt": "ab", "chosen": "abc", "rejected": "abd"}]
    [pair] = tokenized(Dataset.from_list(whole), letters())
    assert [text(ids) for ids in pair] == ["abc<eos>", "abd<eos>"]
    asked = [{**whole[0], "prompt": [says("ab")]}]
    [pair] = tokenized(Dataset.from_list(asked), chats())
    assert pair == tokenized(Dataset.from_list([WHOLE]), chats())[0]
    apart = [*whole, {"prompt": "ab", "chosen": "abc", "rejected": "d"}]  # one does not
    _, pair = tokenized(Dataset.from_list(apart), letters())
    assert [text(ids) for ids in pair] == ["ababc<eos>", "abd<eos>"]


def test_pairs_that_say_something_unread_are_refused_or_named(caplog):
    tokenized(Dataset.from_list([{"question": "a", "chosen": "c", "rejected": "d"}]), letters())
    assert "no column prompt" in caplog.text
    assert "question" in caplog.text
    weighed = WHOLE | {"chosen": [says("ab"), says("c", "assistant") | {"weight": 1}]}
    with pytest.raises(ValueError, match=r"chosen in row 0: weight of message 1 .* SFT"):
        tokenized(Dataset.from_list([weighed]), chats())
    begun = {"prompt": [says("a"), says("b", "assistant")]}
    begun |= {key: [says(key[0], "assistant")] for key in ("chosen", "rejected")}
    with pytest.raises(ValueError, match="prompt in row 0 ends with words of the assistant"):
        tokenized(Dataset.from_list([begun]), chats())


def test_tools_of_pairs_are_shown_or_refused():
    tokenizer = letters()
    shows = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    names = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
    tokenizer.chat_template = names + shows
    answers = {"chosen": [says("b", "assistant")], "rejected": [says("c", "assistant")]}
    row = {"prompt": [says("a")], **answers, "tools": [{"name": "xyz", "parameters": {}}]}
    [pair] = tokenized(Dataset.from_list([row]), tokenizer)
    assert text(pair[0]) == "xyza<eos>b<eos>"
    tokenizer.chat_template = shows
    with pytest.raises(ValueError, match="row 0: tools"):
        tokenized(Dataset.from_list([row]), tokenizer)


def test_columns_of_chats_are_obeyed_beside_a_prompt_or_refused():
    [pair] = tokenized(Dataset.from_list([WHOLE | {"prompt": "ab", "system": "z"}]), chats())
    assert pair == ([21, 28, 23, 3, 4, 3, 5], [21, 28, 23, 3, 4, 3, 6])
    row = {"prompt": "ab", "chosen": "c", "rejected": "d"}
    for column, said in {"system": "z", "tools": [{"name": "f"}]}.items():
        with pytest.raises(ValueError, match=f"row 0 is text, but its column {column}"):
            tokenized(Dataset.from_list([row | {column: said}]), chats())
