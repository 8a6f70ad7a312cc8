"""Reward models: what they read, where they are scored, and what is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_pg.rewards import RewardModel, reward_model as module
from rlhf_pg.rewards.reward_model import sequence_scores
from tests.rewards.calling import Rewards
from tests.tiny import tiny_model

SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
DECODERS = ["gpt2", "llama", "opt", "bloom"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}x{% endif %}"
)

# EOS at the end, inside and in front, pad inside and at the end, one token, many.
ROWS = [[5, 9, 2], [7, 2, 8, 3], [2, 5], [4, 0, 6, 0], [0], [11], [*range(3, 23)]]


def classifier(arch="llama", seed=0, **overrides):
    # Bloom has its shape under names of its own, and no table of positions.
    shape = {"n_layer": 2, "n_head": 4} if arch == "bloom" else {}
    kind = AutoModelForSequenceClassification
    return tiny_model(arch, seed=seed, kind=kind, **({"num_labels": 1} | shape | overrides))


def letters(alphabet="abcdefghijklmnopqrstuvwxyz .", bos=False, **special):
    """One token per character, from id 3 on; a BOS in front if asked for."""
    vocabulary = SPECIAL | {character: i + 3 for i, character in enumerate(alphabet)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@torch.no_grad()
def by_hand(model, ids):
    """The score of one text, without padding."""
    hidden = model.base_model(torch.tensor([ids])).last_hidden_state
    return model.score(hidden[:, -1]).item()


def batch(rows, side, filler):
    width = max(map(len, rows)) + 2
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return ids, mask


def close(scores, expected):
    return scores == pytest.approx(expected, abs=2e-5)


def says(content, role="user"):
    return {"role": role, "content": content}


@pytest.mark.parametrize("filler", [0, 2], ids=["pad", "eos"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("arch", DECODERS)
@torch.no_grad()
def test_decoder_is_scored_at_last_real_token(arch, side, filler):
    model = classifier(arch, pad_token_id=filler)
    expected = [by_hand(model, row) for row in ROWS]
    scores = sequence_scores(model, *batch(ROWS, side, filler))
    assert close(scores.tolist(), expected)
    assert max(expected) - min(expected) > 0.5


@torch.no_grad()
def test_encoder_uses_own_pooling():
    model = classifier("bert")
    expected = [model(torch.tensor([row])).logits.item() for row in ROWS]
    assert close(sequence_scores(model, *batch(ROWS, "right", 0)).tolist(), expected)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "float32"), ("float64", "float64")])
def test_scores_have_at_least_float32(dtype, expected):
    model = classifier(dtype=getattr(torch, dtype))
    ids = torch.tensor([[5, 9]])
    assert sequence_scores(model, ids, torch.ones_like(ids)).dtype == getattr(torch, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_text_is_prompt_and_completion_tokenized_together(pad_token, side):
    tokenizer = letters(bos=True, pad_token=pad_token, padding_side=side)
    model = classifier("gpt2")
    judge = RewardModel(model, tokenizer)
    prompts, completions = ["ab ", "c", "d<eos> "], ["ba.", "", "a<eos>"]
    ids = [[1, 3, 4, 29, 4, 3, 30], [1, 5], [1, 6, 2, 29, 3, 2]]
    assert close(judge(prompts, completions), [by_hand(model, row) for row in ids])


@pytest.mark.parametrize("bos", ["", "<bos>"])
def test_chat_uses_own_template_with_one_bos(bos):
    tokenizer = letters(bos=True)
    tokenizer.chat_template = bos + TEMPLATE
    model = classifier()
    judge = RewardModel(model, tokenizer)
    prompt = [says("be", "system"), says("ab")]
    scores = judge([prompt, [says("a")]], [[says("c", "assistant")], [says("d", "assistant")]])
    opening = [1] if bos else []
    ids = [[21, 4, 7, 23, 3, 4, 3, 5], [23, 3, 3, 6]]  # "s be u ab a c" and "u a a d"
    assert close(scores, [by_hand(model, opening + row) for row in ids])


def test_sampled_eos_is_scored():
    model, tokenizer = classifier(), letters()
    said = (["ab", "ab", "ab"], ["c", "c", "c<eos>"])
    judged = {"ended": [True, False, True]}
    words, ended = by_hand(model, [3, 4, 5]), by_hand(model, [3, 4, 5, 2])
    assert close(RewardModel(model, tokenizer)(*said, **judged), [ended, words, ended])
    blind = RewardModel(model, tokenizer, sees_eos=False)
    assert close(blind(*said, **judged), [words, words, ended])


def test_truncated_chat_turn_is_left_open():
    """But one that a stop string ended, or a limit on turns, is closed."""
    tokenizer, model = letters(), classifier()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] + '<eos>' }}{% endfor %}"
    )
    chats = ([[says("b")]] * 3, [[says("c", "assistant")]] * 3)
    closed, cut = (by_hand(model, [23, 4, 2, 3, 5, *end]) for end in ([2], []))  # "u b a c"
    assert closed != cut
    judge = RewardModel(model, tokenizer)
    assert close(judge(*chats, ended=[True, False, False]), [closed, cut, cut])
    assert close(judge(*chats), [closed] * 3)
    known = {"ended": [False, False, True], "truncated": [False, True, True]}
    scores = Rewards(model, processing_classes=tokenizer)(*chats, [[5]] * 3, {}, **known)
    assert close(scores[:, 0, 0].tolist(), [closed, cut, closed])


def test_dataset_column_does_not_override_ended_flag():
    model, tokenizer = classifier(), letters()
    judge = Rewards(model, processing_classes=tokenizer)
    columns = {"ended": ["yes", "yes"]}
    scores = judge(["ab"] * 2, ["c"] * 2, [[5]] * 2, columns, ended=[True, False])
    expected = [by_hand(model, [3, 4, 5, *end]) for end in ([2], [])]
    assert close(scores[:, 0, 0].tolist(), expected)


@pytest.mark.parametrize("budget", [1, 40])
def test_scores_do_not_depend_on_batch_split(monkeypatch, budget):
    judge = RewardModel(classifier("gpt2"), letters())
    prompts = ["abc", "d", "efghijkl", "m", "no"] * 3
    completions = [chr(97 + i) * (1 + 7 * i % 11) for i in range(15)]
    whole = judge(prompts, completions)
    sizes = []
    monkeypatch.setattr(module, "SCORING_TOKENS", budget)
    judge.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    assert close(judge(prompts, completions), whole)
    assert len(set(whole)) > 10
    assert len(sizes) > 1
    assert all(size <= max(budget, 20) for size in sizes)
    assert judge([], []) == []


def test_scoring_disables_dropout_and_gradients():
    model = classifier("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    judge = RewardModel(model, letters())
    seen = []
    model.score.register_forward_hook(lambda *args: seen.append(args[2].requires_grad))
    assert judge(["ab"], ["c"]) == judge(["ab"], ["c"])
    assert seen == [False, False]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "judge-1B"
    classifier(dtype=torch.bfloat16).save_pretrained(path)
    letters().save_pretrained(path)
    return path


def test_path_is_loaded_with_tokenizer_dtype_and_name(saved):
    judge = RewardModel(str(saved) + "/")
    assert (judge.__name__, judge.model.dtype) == ("judge-1B", torch.bfloat16)
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    assert judge(["ab"], ["c"]) == RewardModel(model, letters())(["ab"], ["c"])
    assert RewardModel(model).__name__ == "judge-1B"
    own = RewardModel(classifier(dtype=torch.bfloat16), letters())
    assert own.__name__ == "LlamaForSequenceClassification"


def length(completions, **_):
    return [float(len(text)) for text in completions]


def test_paths_models_and_functions_may_be_mixed_each_with_its_tokenizer(saved):
    judge = classifier("gpt2", seed=1)
    backwards = letters("zyxwvutsrqponmlkjihgfedcba .")
    tokenizers = [None, None, letters(), backwards]
    rewards = Rewards([saved, length, judge, str(saved)], processing_classes=tokenizers)
    expected = ["judge-1B", "length", "GPT2ForSequenceClassification", "judge-1B_2"]
    assert rewards.names == expected
    texts = (["ab", "b"], ["c", "cc"])
    scores = rewards(*texts, [[1], [1]], {"topic": [1, 2]})[:, 0]
    assert scores[:, 0].tolist() == RewardModel(saved)(*texts)
    assert scores[:, 1].tolist() == [1, 2]
    assert scores[:, 2].tolist() == RewardModel(judge, letters())(*texts)
    assert scores[:, 3].tolist() == RewardModel(saved, backwards)(*texts)
    assert not scores[:, 3].equal(scores[:, 0])


def test_wrong_number_of_tokenizers_raises():
    with pytest.raises(ValueError, match="one entry per reward function, got 1 for 2"):
        Rewards([length, length], processing_classes=[None])


def test_rewards_load_models_on_device(saved):
    rewards = Rewards(saved, device=torch.device("meta"))
    assert rewards.sources[0].function.model.device.type == "meta"


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        ({"num_labels": 3}, {}, "has 3 outputs.*num_labels 1"),
        ({}, {"pad_token": None}, "no pad token: set pad_token"),
        (
            {"vocab_size": 31},
            {"alphabet": "abcdefghijklmnopqrstuvwxyz ABC"},
            "only 31 embedding rows",
        ),
        ({}, None, "no tokenizer was saved with the model"),
    ],
)
def test_unsuitable_model_or_tokenizer_raises(model, tokenizer, message):
    tokenizer = None if tokenizer is None else letters(**tokenizer)
    with pytest.raises(ValueError, match=f"^reward model LlamaForSeq.*{message}"):
        RewardModel(classifier(**model), tokenizer)


def test_incomplete_model_directory_raises(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^reward model judge-1B: the \w+ '.*' cannot be loaded"):
        RewardModel(saved)
    with pytest.raises(ValueError, match=r"reward model judge: there is no model directory \./no/"):
        RewardModel("./no/judge")


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ([says("ab")], [says("c", "assistant")], "text in row 1 is a list of .* no chat_template"),
        (
            "a" * 60,
            "b" * 5,
            "text in row 1 has 65 tokens, more than the model's max_position.* of 64",
        ),
        ("", "", "text in row 1 is empty"),
        ("a", "B", "text in row 1 cannot be tokenized"),
        ("a", [says("b")], "text in row 1: prompt and completion must both be strings or both"),
    ],
)
def test_unscorable_text_raises_with_row(saved, prompt, completion, message):
    judge = RewardModel(saved)
    with pytest.raises(ValueError, match=f"^reward model judge-1B: {message}"):
        judge(["a" * 60, prompt], ["b" * 4, completion])  # the first is as long as is allowed


def test_adapter_on_a_reward_model_is_refused():
    adapted = get_peft_model(classifier(), LoraConfig(task_type="SEQ_CLS"))
    with pytest.raises(TypeError, match="merge_and_unload"):
        Rewards([adapted])
