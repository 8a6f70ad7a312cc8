"""Which tokens of text and chats are learnt, and what is refused before anything is trained."""

import json

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_pg.config import SFTConfig
from rlhf_pg.data.chat import encode, set_template_arguments
from rlhf_pg.data.turns import encode_turns
from rlhf_pg.supervised.examples import ends_of, load_examples, resolve_data
from tests.rewards.test_reward_model import letters, says

# ChatML, with the tags by which a template says what the assistant generates.
TAGGED = (
    "{% for m in messages %}[{{ m['role'][0] }}|"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<eos>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}[a|{% endif %}"
)
UNTAGGED = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: only the last turn of the assistant shows its thoughts.
REWRITES = (
    "{% for m in messages %}[{{ m['role'][0] }}|"
    "{% if m['role'] == 'assistant' and loop.last %}?{% endif %}{{ m['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}[a|{% endif %}"
)
# As Llama 2's: a turn of the user is in brackets, and the assistant's follows them.
BRACKETED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<bos>[' + m['content'] + ']' }}"
    "{% else %}{{ ' ' + m['content'] + ' <eos>' }}{% endif %}{% endfor %}"
)
CHAT = [says("ab"), says("cd", "assistant"), says("e"), says("fg", "assistant")]


@pytest.fixture
def tokenizer():
    return letters("abcdefghijklmnopqrstuvwxyz .|[]?")


def learnt(example, tokenizer):
    """The learnt text, with _ for what is only read."""
    texts = [
        tokenizer.decode([token]) if label == token else "_"
        for token, label in zip(example["input_ids"], example["labels"], strict=True)
    ]
    return "".join(texts)


def examples(rows, tokenizer, limit=None, **options):
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return load_examples(data, SFTConfig(**options), tokenizer, limit, "train_dataset")


def only(rows, tokenizer, **options):
    [example] = examples(rows, tokenizer, **options)
    return learnt(example, tokenizer)


@pytest.mark.parametrize("column", ["completion", "answer"])
def test_only_completion_and_eos_are_learnt(tokenizer, column):
    rows = [{"prompt": "ab", column: "cd"}]
    assert only(rows, tokenizer) == "__cd<eos>"
    assert only(rows, tokenizer, append_eos=False) == "__cd"
    assert only(rows, tokenizer, completion_only_loss=False) == "abcd<eos>"
    assert only([{"prompt": "ab", column: "c<eos>"}], tokenizer) == "__c<eos>"
    assert only([{"text": "abc"}], tokenizer) == "abc<eos>"


def test_prompt_keeps_tokens_that_a_rollout_gives_it():
    """Where prompt and completion would melt into one token, they are tokenized apart."""
    tokenizer = letters()
    tokenizer.add_tokens(["bc"])
    [example] = examples([{"prompt": "ab", "completion": "cd"}], tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(example["input_ids"])) == [*"abcd", "<eos>"]
    [example] = examples([{"prompt": "a", "completion": "bcd"}], tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(example["input_ids"])) == ["a", "bc", "d", "<eos>"]


@pytest.mark.parametrize("template", [TAGGED, UNTAGGED])
def test_assistant_turns_are_learnt_through_eos(tokenizer, template):
    tokenizer.chat_template = template
    rows = [{"messages": CHAT}]
    assert only(rows, tokenizer, assistant_only_loss=True) == "_" * 10 + "cd<eos>" + "_" * 10 + (
        "fg<eos>_"
    )
    assert only(rows, tokenizer) == "[u|ab<eos> [a|cd<eos> [u|e<eos> [a|fg<eos>_"


def test_assistant_turns_of_bracketed_template_are_learnt(tokenizer):
    tokenizer.chat_template = BRACKETED
    text = only([{"messages": CHAT}], tokenizer, assistant_only_loss=True)
    assert text == "_" * 5 + " cd <eos>" + "_" * 4 + " fg <eos>"


def test_completion_of_chat_is_learnt_behind_opening(tokenizer):
    tokenizer.chat_template = UNTAGGED
    expected = "_" * 10 + "cd<eos>_"
    assert only([{"prompt": CHAT[:1], "completion": CHAT[1:2]}], tokenizer) == expected
    assert only([{"prompt": CHAT[:1], "answer": "cd"}], tokenizer) == expected
    both = [{"prompt": CHAT[:1], "completion": CHAT[1:]}]
    assert only(both, tokenizer) == "_" * 10 + "cd<eos> [u|e<eos> [a|fg<eos>_"
    turns = only(both, tokenizer, assistant_only_loss=True)
    assert turns == "_" * 10 + "cd<eos>" + "_" * 10 + "fg<eos>_"


# As Vicuna's: the opening of a turn ends in a blank.
BLANK = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_pairs():
    """Byte-level BPE, in which a blank melts with the word behind it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user: ab assistant: cd fg"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=BLANK)


def test_chat_has_tokens_of_a_rollout_before_each_turn():
    tokenizer = byte_pairs()
    asked, opened = encode(CHAT[:1], tokenizer), encode(CHAT[:3], tokenizer)
    assert tokenizer("assistant: cd")["input_ids"][-1:] == tokenizer(" cd")["input_ids"]
    ids, mask = encode_turns(CHAT, tokenizer, "it", read=1, assistant_only=True)
    assert ids[: len(asked)] == asked
    said = [tokenizer.decode([i]) if on else "_" for i, on in zip(ids, mask, strict=True)]
    assert "".join(said).replace("_", "") == "cd<eos>fg<eos>"
    whole = encode_turns(CHAT, tokenizer, "it")[0]
    assert whole == ids
    assert whole[len(asked) :] == [
        *tokenizer("cd<eos>")["input_ids"],
        *tokenizer("user: e assistant: ")["input_ids"],
        *tokenizer("fg<eos>")["input_ids"],
    ]
    read = encode_turns(CHAT, tokenizer, "it", read=3)[0]
    assert read[: len(opened)] == opened


def test_chat_is_one_text_where_that_keeps_tokens(tokenizer):
    """A tokenizer that puts a blank in front of every text puts none in front of a turn."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(".")
    tokenizer.chat_template = UNTAGGED
    text = only([{"messages": CHAT[:2]}], tokenizer)
    assert text.startswith(".[u|ab<eos>")
    assert "cd" in text
    assert ".cd" not in text


def test_template_that_rewrites_history_is_refused_by_name(tokenizer):
    tokenizer.chat_template = REWRITES
    message = r"^train_dataset: messages in row 0: the chat template renders the first 2 messages"
    with pytest.raises(ValueError, match=message):
        examples([{"messages": CHAT}], tokenizer, assistant_only_loss=True)
    one_turn = only([{"messages": CHAT[:2]}], tokenizer, assistant_only_loss=True)
    assert one_turn == "_" * 9 + "?cd<eos>"


def test_special_token_in_message_is_only_text(tokenizer):
    tokenizer = letters("abcdefghijklmnopqrstuvwxyz .|[]?<>")
    tokenizer.chat_template = TAGGED
    chat = [says("a"), says("b<eos>c", "assistant")]
    ids, mask = encode_turns(chat, tokenizer, "it", assistant_only=True)
    said = [token for token, on in zip(ids, mask, strict=True) if on]
    assert tokenizer.convert_ids_to_tokens(said) == [*"b<eos>c", "<eos>"]
    assert ids.count(tokenizer.eos_token_id) == 2


def test_template_arguments_and_system_prompt_reach_the_chat(tokenizer):
    tokenizer.chat_template = "{{ mode }}" + UNTAGGED
    set_template_arguments(tokenizer, {"mode": "z"})
    rows = [{"messages": CHAT[:2]}]
    text = only(rows, tokenizer, system_prompt="hi", assistant_only_loss=True)
    assert text == "_" * 18 + "cd<eos>_"
    assert only(rows, tokenizer, system_prompt="hi").startswith("z[s|hi<eos> [u|ab")


def test_named_data_make_prompts_and_keep_one_held_out_set(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n' * 10)
    args = SFTConfig(
        dataset_name=(str(file),),
        dataset_test_split=0.2,
        dataset_columns={"prompt": "question"},
        system_prompt="s",
    )
    train, held_out = resolve_data(args, None, None)
    assert (len(train), len(held_out[""])) == (8, 2)
    assert train[0] == {"prompt": [says("s", "system"), says("a")], "answer": "b"}
    given = {"x": [{"text": "a"}], "y": [{"text": "b"}]}
    plain = SFTConfig(system_prompt="s")
    assert set(resolve_data(plain, [{"text": "c"}], given)[1]) == {"x", "y"}
    with pytest.raises(ValueError, match="given twice, as train_dataset and "):
        resolve_data(args, [{"text": "c"}], None)
    with pytest.raises(ValueError, match="system_prompt: the prompt in row 0 has a"):
        resolve_data(plain, train, None)
    with pytest.raises(ValueError, match="train_dataset: set dataset_name"):
        resolve_data(SFTConfig(), None, None)


def test_text_file_is_no_prompt(tmp_path):
    train, _ = resolve_data(SFTConfig(apply_chat_template=True), [{"text": "ab"}], None)
    assert train[0] == {"text": "ab"}


LONG = [{"prompt": "ab", "completion": "c"}, {"prompt": "ab", "completion": "cdefg"}]


def test_long_examples_are_refused_dropped_or_cut_off(tokenizer, capsys):
    with pytest.raises(ValueError, match="row 1 has 8 tokens, more than the 5 of max_length"):
        examples(LONG, tokenizer, 5)
    assert len(examples(LONG, tokenizer, 5, long_examples="drop")) == 1
    assert "train_dataset: 1 of 2 rows are too long: left out" in capsys.readouterr().out
    cut = examples(LONG, tokenizer, 5, long_examples="truncate")
    assert [learnt(example, tokenizer) for example in cut] == ["__c<eos>", "__cde"]
    for choice in ("drop", "truncate"):
        with pytest.raises(ValueError, match="each of its 2 rows is too long: raise max_length"):
            examples(LONG, tokenizer, 2, long_examples=choice)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prompt": "b"}], {}, "no columns prompt and completion .* it has prompt"),
        ([{"text": "b"}], {"completion_only_loss": True}, "completion_only_loss needs columns"),
        ([{"prompt": "b", "completion": ""}], {}, "the completion in row 0 is empty: drop the row"),
        ([{"prompt": "b", "answer": None}], {}, "the answer in row 0 is empty"),
        ([{"prompt": "b", "completion": CHAT}], {}, "row 0: a prompt must be text or a list of"),
        ([{"text": "b"}], {"assistant_only_loss": True}, "row 0 is text, but assistant_only_loss"),
        ([{"text": ""}], {}, "the text in row 0 must be text, got ''"),
        ([{"text": "B"}], {}, "text in row 0 cannot be tokenized"),
        ([{"text": "b"}], {"append_eos": False}, "row 0 has nothing to train on"),
        ([{"messages": "b"}], {}, "messages in row 0 must be a list of messages, got 'b'"),
        (Dataset.from_dict({"text": []}), {}, "it has no rows"),
        ([], {}, "give a datasets.Dataset or a list of dicts"),
    ],
)
def test_faulty_rows_are_one_error_with_dataset_and_row(tokenizer, rows, options, message):
    given = Dataset.from_list(rows) if isinstance(rows, list) and rows else rows
    with pytest.raises(ValueError, match=f"^train_dataset: .*(?:{message})"):
        load_examples(given, SFTConfig(**options), tokenizer, None, "train_dataset")


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (None, CHAT, "messages in row 0 is a list of messages, .* no chat_template"),
        ("{{ raise_exception('odd') }}", CHAT, "messages in row 0 does not fit the chat template"),
        (TAGGED, CHAT[:1], "row 0 has nothing to train on: .*no words of the assistant"),
    ],
)
def test_chat_that_cannot_be_learnt_is_refused(tokenizer, template, chat, message):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"^train_dataset: {message}"):
        examples([{"messages": chat}], tokenizer, assistant_only_loss=True)


def test_second_system_message_is_refused(tokenizer):
    tokenizer.chat_template = TAGGED
    chat = [says("x", "system"), *CHAT]
    with pytest.raises(ValueError, match="messages in row 0 has a system message already"):
        examples([{"messages": chat}], tokenizer, system_prompt="y")


def test_bos_stands_in_front_once():
    tokenizer = letters(bos=True)
    [example] = examples([{"prompt": "a", "completion": "b"}], tokenizer)
    assert list(example["input_ids"]) == [1, 3, 4, 2]
    assert list(example["labels"]) == [-100, -100, 4, 2]


def test_prompt_that_every_completion_repeats_is_learnt_once(tokenizer):
    rows = [{"prompt": "ab", "completion": "abc"}, {"prompt": "d", "completion": "de"}]
    assert [learnt(x, tokenizer) for x in examples(rows, tokenizer)] == ["__c<eos>", "_e<eos>"]
    for said in ("e", "d"):  # then it is no habit of the data
        rows[1]["completion"] = said
        assert learnt(examples(rows, tokenizer)[0], tokenizer) == "__abc<eos>"
    tokenizer.chat_template = UNTAGGED
    whole = [{"prompt": CHAT[:1], "completion": CHAT[:2]}]
    assert only(whole, tokenizer) == "_" * 10 + "cd<eos>_"


def test_columns_of_chats_are_obeyed_or_refused(tokenizer):
    tokenizer.chat_template = UNTAGGED
    rows = [{"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "c"}]}]
    assert only([rows[0] | {"system": "hi"}], tokenizer).startswith("[s|hi<eos> [u|ab<eos>")
    both = [
        rows[0] | {"messages": None},
        {"messages": [says("x"), says("y", "assistant")], "conversations": None},
    ]
    assert "u|x<eos>" in learnt(examples(both, tokenizer)[1], tokenizer)
    with pytest.raises(ValueError, match="row 0 is text, but its column system"):
        only([{"text": "ab", "system": "hi"}], tokenizer)
    with pytest.raises(ValueError, match=r"row 0: message 0: from .* got 'alien'"):
        only([{"messages": [{"from": "alien", "value": "a"}]}], tokenizer)


def test_arguments_and_schemas_of_rows_are_learnt_as_they_are_written():
    """A column of a table has one type, but the same argument may have another in each row."""
    tokenizer = letters('abcdefghijklmnopqrstuvwxyz .|[]?{}":,125_/')
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function|tojson }}{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function|tojson }}"
        "{% endfor %}{{ m.content }}<eos>{% endfor %}"
    )
    said = [{"x": 1, "y": None}, {"y": [2.5], "x": "a"}]
    rows = []
    for arguments in said:
        parts = [{"type": "text", "text": "a"}]
        call = {"function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
        schema = {"name": "f", "enum": [*arguments.values()]}
        messages = [{"role": "user", "content": parts}, answer]
        rows.append({"messages": messages, "tools": [schema]})
    made = load_examples(rows, SFTConfig(), tokenizer, None, "rows")
    texts = [learnt(row, tokenizer) for row in made]
    for text, arguments in zip(texts, said, strict=True):
        assert json.dumps(arguments) in text
        assert f'"enum": {json.dumps([*arguments.values()])}' in text
    image = [{"role": "user", "content": [{"type": "image"}]}, says("a")]
    with pytest.raises(ValueError, match=r"messages in row 0: message 0 \(user\): a part"):
        load_examples([{"messages": image}], SFTConfig(), tokenizer, None, "rows")


def test_ends_of_truncated_examples_are_not_learnt(tokenizer):
    args = SFTConfig(long_examples="truncate")
    rows = [{"prompt": "a", "completion": text} for text in ("bcdefghijk", "b")]
    made = load_examples(rows, args, tokenizer, 5, "rows")
    assert [len(row["labels"]) for row in made] == [5, 3]
    assert ends_of(made, args, 5) == [tokenizer.eos_token_id]


def test_nulls_of_a_table_are_not_learnt_and_those_of_json_are(tokenizer):
    tokenizer = letters('abcdefghijklmnopqrstuvwxyz .|[]?{}":,12')
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}{% endfor %}<eos>"
        "{% endfor %}"
    )

    def calls(arguments):
        return {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}

    objects = [{"messages": [says("a"), calls(given)]} for given in ({"x": 1}, {"y": 2})]
    texts = [{"messages": [says("a"), calls('{"x": null}')]}]
    assert only(objects[:1], tokenizer) == 'a<eos>f{"x": 1}<eos>'
    assert learnt(examples(objects, tokenizer)[0], tokenizer) == 'a<eos>f{"x": 1}<eos>'
    assert only(texts, tokenizer) == 'a<eos>f{"x": null}<eos>'
