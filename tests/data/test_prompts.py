"""Prompts as tokens, what is refused, and the order in which they are drawn."""

import itertools
import logging
import string
from collections import Counter

import pytest
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_pg.config import GRPOConfig
from rlhf_pg.data.chat import continues, encode, encode_answer, whole_turn
from rlhf_pg.data.prompts import PromptSampler, load_prompts, permutation
from rlhf_pg.data.sources import make_prompts
from rlhf_pg.tasks.tiny import character_tokenizer

# Ids: pad 0, EOS 1, <user> 2, <assistant> 3, a 4, b 5, c 6.
CHARACTERS = "abc"
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def plain():
    return character_tokenizer(CHARACTERS)


def with_bos(chat_template=BOS_TEMPLATE):
    """A tokenizer that puts BOS, here `<user>`, in front of every text."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.bos_token = "<user>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<user> $A", special_tokens=[("<user>", 2)]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def dataset(*prompts, **columns):
    return Dataset.from_dict({"prompt": list(prompts), **columns})


def message(content, role="user"):
    return {"role": role, "content": content}


def test_string_prompts_are_tokenized_and_rows_kept():
    prompts = load_prompts(dataset("ab", "cab", "a", answer=[7, 8, 9]), plain())
    assert prompts.tokens == [[4, 5], [6, 4, 5], [4]]
    assert (len(prompts), prompts.longest) == (3, 3)
    assert prompts.rows["answer"] == [7, 8, 9]
    assert prompts.rows["prompt"] == ["ab", "cab", "a"]


def byte_tokenizer():
    """One token per byte, `<end>` 0 and `<end>>` 1."""
    model = models.BPE(
        {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": ["<end>>"]})
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    return fast


@pytest.mark.parametrize("text", ["a<end>b<end>>c", "a\ue0030\ue004", "\ue000\ue001\ue002b"])
def test_message_content_yields_no_control_token(text):
    tokenizer = byte_tokenizer()
    ends = set(tokenizer.convert_tokens_to_ids(["<end>", "<end>>"]))
    *said, end = encode([message(text)], tokenizer)
    assert (end, set(said) & ends) == (tokenizer.eos_token_id, set())
    assert tokenizer.decode(said) == text
    assert set(encode("a<end>", tokenizer)) & ends  # a string may have been rendered before
    assert tokenizer.decode(encode("a\ue0030\ue004", tokenizer)) == "a\ue0030\ue004"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user<end>", "content": ""},
        {
            "role": "tool",
            "content": "",
            "tool_calls": [{"name": "f", "arguments": '{"role": "<end>"}'}],
        },
    ],
)
def test_message_role_yields_no_control_token(message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    said = encode([message], tokenizer)
    assert tokenizer.eos_token_id not in said
    assert "<end>" in tokenizer.decode(said)


def test_role_may_equal_special_token():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["user"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    )
    user, *said = encode([message("the user")], tokenizer)
    assert user == tokenizer.convert_tokens_to_ids("user")
    assert tokenizer.decode(said) == ": the user"
    assert user not in said


def test_unigram_message_content_yields_no_control_token():
    pieces = [("<end>", 0.0), *((letter, -9.0) for letter in "<end>ab")]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(pieces)), eos_token="<end>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    said = encode([message("a<end>b")], fast)
    assert said.count(fast.eos_token_id) == 1
    assert fast.convert_ids_to_tokens(said) == [*"a<end>b", "<end>"]


def test_environment_answer_yields_no_control_token():
    tokenizer = byte_tokenizer()
    prompt = [message("a<end>")]
    for text in ("<end>b", "\ue000\ue001\ue002<end>b", "\ue000\ue001\ue002"):
        said = encode_answer([message(text, "tool")], tokenizer, prompt, tokenizer.eos_token_id)
        assert tokenizer.decode(said) == text + "<end>"
        assert said.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    "words", ["ab ", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]]
)
def test_last_assistant_message_is_continued(words):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' }}"
        "{% if m['content'] is string %}{{ m['content'] | trim }}"
        "{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}<end>"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    chat = [message("q"), message(words, "assistant")]
    assert tokenizer.decode(encode(chat, tokenizer)) == "u:q<end>a:ab "
    assert tokenizer.decode(encode(chat[:1], tokenizer)) == "u:q<end>a:"
    closed = encode(chat, tokenizer, open_turn=False)
    assert tokenizer.decode(closed).replace(" ", "") == "u:q<end>a:ab<end>"
    answer = encode_answer([message("t", "tool")], tokenizer, chat, None)
    assert tokenizer.decode(answer) == "<end>t:t<end>a:"
    joined = [message("ab c", "assistant")]
    assert whole_turn(chat, [message("c", "assistant")]) == (chat[:1], joined)
    assert whole_turn(chat, []) == (chat, [])


def test_assistant_tool_call_is_not_continued():
    assert not continues([message("", "assistant") | {"tool_calls": [{}]}])


def test_messages_become_chat_with_generation_prompt():
    chat = [message("ab"), message("c", "assistant"), message("a")]
    prompts = load_prompts(dataset([message("ab")], chat), plain())
    assert prompts.tokens == [[2, 4, 5, 3], [2, 4, 5, 3, 6, 1, 2, 4, 3]]
    assert prompts.rows["prompt"][1] == chat


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids"),
    [
        (with_bos(), "ab", [2, 4, 5]),
        (with_bos(), "<user>ab", [2, 4, 5]),  # in the text and from the tokenizer
        (with_bos(), [message("ab")], [2, 4, 5]),  # from the template alone
        (with_bos(), "", [2]),
        (with_bos(BOS_TEMPLATE.removeprefix("{{ bos_token }}")), [message("ab")], [4, 5]),
        (plain(), "<user><user>a", [2, 2, 4]),
    ],
)
def test_bos_is_prepended_once_if_there_is_one(tokenizer, prompt, ids):
    assert encode(prompt, tokenizer) == ids


@pytest.mark.fault(37, "refused by its row")
@pytest.mark.parametrize(
    ("prompts", "row"),
    [(["a", ""], 1), (["a", "b", None], 2), ([[message("a")], []], 1), ([[4, 5]], 0), ([3], 0)],
)
def test_empty_or_invalid_prompt_raises_with_row(prompts, row):
    with pytest.raises(ValueError, match=f"prompt in row {row} (is empty|must be a string or)"):
        load_prompts(dataset(*prompts), plain())


@pytest.mark.fault(37, "an error names the columns that are there")
def test_missing_prompt_column_error_names_columns():
    data = Dataset.from_dict({"question": ["a"], "answer": ["b"]})
    with pytest.raises(ValueError, match=r"no column 'prompt'.*question, answer"):
        load_prompts(data, plain())


@pytest.mark.parametrize("shape", [{"type": "pandas"}, {"columns": ["answer"]}])
def test_formatted_dataset_rows_are_plain(shape):
    plain = Dataset.from_dict({"prompt": ["1+1=", "2"], "answer": ["2", "2"]})
    loaded, tokenizer = plain.with_format(**shape), character_tokenizer("12+=")
    assert load_prompts(loaded, tokenizer).rows[0] == {"prompt": "1+1=", "answer": "2"}


@pytest.mark.fault(34, "refused")
def test_empty_dataset_raises():
    with pytest.raises(ValueError, match=r"the dataset has no prompts$"):
        load_prompts(dataset(), plain())


@pytest.mark.fault(36, "an error names the first")
def test_long_prompts_raise_with_first_row():
    data = dataset("a", "abc", "ab", "abcabc")
    with pytest.raises(ValueError, match=r"^2 prompts .* 2; the first is row 1 with 3 tokens"):
        load_prompts(data, plain(), max_prompt_length=2)
    with pytest.raises(ValueError, match="row 0 with 4 tokens"):  # with the chat template
        load_prompts(dataset([message("ab")]), plain(), max_prompt_length=3)
    assert len(load_prompts(data, plain(), max_prompt_length=6)) == 4


@pytest.mark.fault(36, "or they are dropped and counted (long_prompts)")
def test_longer_prompts_are_dropped_with_columns_and_counted(caplog):
    data = dataset("a", "abc", "ab", "abcabc", answer=[1, 2, 3, 4])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(data, plain(), max_prompt_length=2, long_prompts="drop")
    assert prompts.tokens == [[4], [4, 5]]
    assert prompts.rows["prompt"] == ["a", "ab"]
    assert prompts.rows["answer"] == [1, 3]
    assert "dropped 2 of 4 prompts" in caplog.text


@pytest.mark.fault(34, "refused")
def test_dropping_every_prompt_raises():
    with pytest.raises(ValueError, match="no prompts left: all were too long"):
        load_prompts(dataset("abc", "abcabc"), plain(), 2, "drop")


@pytest.mark.parametrize(
    ("positions", "budget", "message"),
    [
        (8, 100, r"\(3\) .* is 9 tokens, more than the model's max_position_embeddings of 8"),
        (None, 8, r"\(3\) .* is 9 tokens, more than micro_batch_tokens 8"),
    ],
)
def test_row_beyond_positions_or_budget_raises(positions, budget, message):
    fit = {"positions": positions, "micro_batch_tokens": budget}
    load_prompts(dataset("a", "abc"), plain(), max_completion_length=5, **fit)
    with pytest.raises(ValueError, match=message):
        load_prompts(dataset("a", "abc", "ab"), plain(), max_completion_length=6, **fit)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 9), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_each_epoch_draws_every_row_once(size, seed, shuffle):
    rows = PromptSampler(size, seed, shuffle).rows(range(4 * size))
    for epoch in range(4):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=25, deadline=None)
@given(draws=st.lists(st.integers(0, 60)), size=st.integers(1, 9))
def test_drawn_row_depends_only_on_seed_and_draw(draws, size):
    whole = PromptSampler(size, seed=5).rows(range(61))
    assert PromptSampler(size, seed=5).rows(draws) == [whole[draw] for draw in draws]


def test_epochs_and_seeds_have_different_orders():
    epochs = [tuple(PromptSampler(50, 0).rows(range(50 * e, 50 * e + 50))) for e in range(5)]
    seeds = [tuple(PromptSampler(50, seed).rows(range(50))) for seed in range(5)]
    assert len({*epochs, *seeds}) == 9  # seed 0, epoch 0 is in both
    assert tuple(range(50)) not in {*epochs, *seeds}


def test_unshuffled_rows_keep_their_order():
    assert PromptSampler(3, seed=1, shuffle=False).rows(range(7)) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.fault(35, "prompts come again, in the order of the next epoch")
def test_step_larger_than_dataset_wraps_around():
    rows = PromptSampler(3, seed=1).rows(range(8))
    assert set(Counter(rows).values()) == {2, 3}
    assert PromptSampler(1, seed=1).rows([0, 1, 5]) == [0, 0, 0]


def test_permutation_depends_on_every_key_part():
    keys = list(itertools.product(range(3), repeat=3))
    orders = {tuple(permutation(30, *key)) for key in keys}
    assert len(orders) == len(keys)
    assert permutation(30, 1, 2, 3) == permutation(30, 1, 2, 3)
    assert all(sorted(order) == list(range(30)) for order in orders)


def test_permutations_are_equally_likely():
    counts = Counter(tuple(PromptSampler(3, 0).rows(range(3 * e, 3 * e + 3))) for e in range(1200))
    assert len(counts) == 6
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 30  # chi-square, 5 dof: p < 2e-5


def test_nulls_that_a_table_adds_to_tool_calls_are_not_rendered():
    """All rows of an Arrow column have one type, so each call has the arguments of all."""

    def chat(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]

    tokenizer = character_tokenizer(string.printable.strip())
    tokenizer.chat_template = "{{ (messages | tojson).replace(' ', '') }}"
    chats = [chat(a=1), chat(b=2)]
    united = Dataset.from_list([{"prompt": one} for one in chats])["prompt"]
    assert [encode(one, tokenizer) for one in united] == [encode(one, tokenizer) for one in chats]


@pytest.mark.parametrize(
    ("text", "ids"), [("ab", [4, 5]), ("ab<eos>", [4, 5, 1]), ("a b", None), ("", None)]
)
def test_eos_that_a_tokenizer_appends_is_not_in_a_prompt(text, ids):
    tokenizer = plain()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    if ids is None:
        with pytest.raises(ValueError, match=r"prompt in row 0 (cannot be tokenized|is empty)"):
            encode(text, tokenizer)
    else:
        assert encode(text, tokenizer) == ids


@pytest.mark.parametrize("value", [["a.png"], {"bytes": "x"}, "a.png"])
@pytest.mark.parametrize("name", ["images", "audio", "chat_template_kwargs"])
def test_columns_that_no_run_obeys_are_refused_by_row(value, name):
    rows = [{"prompt": "a", name: None}, {"prompt": "b", name: value}]
    with pytest.raises(ValueError, match=f"train_dataset: row 1 has {name}"):
        make_prompts(rows, GRPOConfig(), "train_dataset")
