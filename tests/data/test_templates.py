"""The chat templates that trl ships, by all kinds of messages: each is shown whole, or refused."""

from functools import cache
from importlib.resources import files

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_pg.data import rendering
from rlhf_pg.data.chat import encode, encode_answer
from rlhf_pg.data.messages import read_tools
from rlhf_pg.data.turns import encode_turns
from tests.agents.test_history import bytes_tokenizer

pytest.importorskip("trl")
FOLDER = files("trl").joinpath("chat_templates")
# Those for training differ from the others by marks and by showing more of the history.
NAMES = sorted(
    path.name.removesuffix(".jinja")
    for path in FOLDER.iterdir()
    if path.name.endswith(".jinja") and not path.name.endswith("_training.jinja")
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}]


@cache
def tokenizer_with(name: str) -> PreTrainedTokenizerFast:
    text = FOLDER.joinpath(f"{name}.jinja").read_text()
    return bytes_tokenizer(text, "<|im_end|>" if "im_end" in text else "<end>")


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def calls(arguments: object) -> list[dict]:
    call = {"id": "call12345", "type": "function", "function": {"name": "add"}}
    call["function"]["arguments"] = arguments
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [user("alpha"), asked, {"role": "tool", "tool_call_id": "call12345", "content": "omega"}]


# Chats, their tools, and the words that have to come back.
SHOWN = {
    "plain": ([user("alpha beta")], (), "alpha beta"),
    "parts": ([user([{"type": "text", "text": "alpha"}])], (), "alpha"),
    "sharegpt": ([{"from": "human", "value": "alpha"}], (), "alpha"),
    "system": ([{"role": "system", "content": "sigma"}, user("alpha")], (), "sigma alpha"),
    "developer": ([{"role": "developer", "content": "sigma"}, user("alpha")], (), "sigma alpha"),
    "tools": ([user("alpha")], TOOLS, "alpha add"),
    "calls": (calls({"x": "zeta"}), TOOLS, "alpha add zeta omega"),
    "calls as text": (calls('{"x": "zeta"}'), TOOLS, "alpha add zeta omega"),
}
MAY_REFUSE = {"system", "developer", "tools", "calls", "calls as text"}
REFUSED = {
    "number": [user(4)],
    "text": [{"role": "user", "text": "alpha"}],
    "image": [user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "alpha"}])],
    "name": [user("alpha") | {"name": "bob"}],
    "mask": [user("alpha") | {"mask": False}],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_word_is_shown_or_refused(name: str) -> None:
    tokenizer = tokenizer_with(name)
    shown = set()
    for kind, (chat, tools, words) in SHOWN.items():
        try:
            text = tokenizer.decode(encode(chat, tokenizer, tools=tools))
        except ValueError:
            continue
        shown.add(kind)
        for word in words.split():
            assert word in text, kind
    assert {*SHOWN} - shown <= MAY_REFUSE
    assert ("calls" in shown) == ("calls as text" in shown)
    for chat in REFUSED.values():
        with pytest.raises(ValueError, match=r"row 0.* message 0 \(user\)"):
            encode(chat, tokenizer)

    check_thoughts(tokenizer)


def check_thoughts(tokenizer: PreTrainedTokenizerFast) -> None:
    """Those of the last turn are learnt, and every turn ends."""
    for turn in (
        {"content": "<think>\ntau\n</think>\n\nbeta"},
        {"content": "beta", "reasoning_content": "tau"},
    ):
        chat = [user("alpha"), {"role": "assistant", **turn}]
        ids, mask = encode_turns(chat, tokenizer, "row 0")
        text = tokenizer.decode(ids)
        assert text.index("alpha") < text.index("tau") < text.index("beta")
        last = [token for token, learnt in zip(ids, mask, strict=True) if learnt][-1]
        assert last in tokenizer.added_tokens_decoder


def test_words_of_schemas_that_a_template_does_not_show_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unit = {"type": "string", "description": "which unit", "enum": ["kelvin"]}
    schema = {"type": "object", "properties": {"unit": unit}}
    tools = read_tools([{"name": "add", "input_schema": schema}], "tools")
    gemma = tokenizer_with("gemma4")
    rendering._say_hidden.cache_clear()
    assert "kelvin" in gemma.decode(encode([user("a")], gemma, tools=tools))
    assert not caplog.messages
    shows = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    encode([user("a")], bytes_tokenizer(shows, "<end>"), tools=tools)
    said = [f"all that is under {key!r}" in caplog.text for key in ("properties", "enum")]
    assert said == [True, True]


def test_end_of_turn_is_not_doubled() -> None:
    tokenizer = tokenizer_with("gptoss")
    stop = tokenizer.convert_tokens_to_ids("<|return|>")
    answer = tokenizer.decode(encode_answer([user("next")], tokenizer, [user("a")], stop))
    assert answer.startswith("<|start|>user<|message|>next<|end|>")


def test_weights_of_messages_are_obeyed() -> None:
    tokenizer = tokenizer_with("qwen2_5")
    chat = [
        user("a"),
        {"role": "assistant", "content": "first", "train": False},
        user("b"),
        {"role": "assistant", "content": "second", "weight": 1},
    ]
    for only in (False, True):
        ids, mask = encode_turns(chat, tokenizer, "row 0", assistant_only=only)
        learnt = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
        assert "second<|im_end|>" in learnt
        assert "first" not in learnt
    asked = [user("question") | {"weight": 1}, {"role": "assistant", "content": "answer"}]
    ids, mask = encode_turns(asked, tokenizer, "row 0", assistant_only=True)
    learnt = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert "question<|im_end|>" in learnt
    with pytest.raises(ValueError, match="weight"):
        encode_turns([user("a") | {"weight": 2}], tokenizer, "row 0")


# A block for the thought and one for the answer: as many as there are turns, if one calls a tool.
TWO_BLOCKS = (
    "{% for m in messages %}{{ m.role }} {% if m.role != 'assistant' %}{{ m.content }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function|tojson }}{% else %}"
    "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", ["phi3_training", "diffusion_gemma_training", "two blocks"])
def test_weights_are_obeyed_however_a_template_tags_turns(name: str) -> None:
    two = name == "two blocks"
    tokenizer = bytes_tokenizer(TWO_BLOCKS, "<|im_end|>") if two else tokenizer_with(name)
    first = {"role": "assistant", "content": "first", "weight": 0}
    second = {"role": "assistant", "content": "second"}
    if two:
        first, second = first | {"reasoning_content": "t"}, second | {"reasoning_content": "u"}
    before = calls({"x": 1}) if two else [user("a")]
    chat = [*before, first, user("b"), second]
    ids, mask = encode_turns(chat, tokenizer, "row 0", assistant_only=True)
    learnt = tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])
    assert "second" in learnt
    assert "first" not in learnt
    assert ("</think>" in learnt) == two


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss"])
def test_rules_of_a_developer_move_no_mask(name: str) -> None:
    """They may be joined to the system message before them: turns have other numbers then."""
    rules = [{"role": "system", "content": "s"}, {"role": "developer", "content": "rules"}]
    chat = [*rules, user("a"), {"role": "assistant", "content": "beta"}]
    for options in ({"read": 3}, {"assistant_only": True}):
        ids, mask = encode_turns(chat, tokenizer_with(name), "row 0", **options)
        text = tokenizer_with(name).decode([i for i, on in zip(ids, mask, strict=True) if on])
        assert "beta" in text
        assert "rules" not in text
        assert "rules" in tokenizer_with(name).decode(ids)
    answer = encode_answer([user("next")], tokenizer_with(name), chat[:3], None)
    assert "rules" not in tokenizer_with(name).decode(answer)


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v5", "diffusion_gemma"])
def test_old_thoughts_are_left_out_as_the_template_does(name: str) -> None:
    first = {"role": "assistant", "content": "beta", "thinking": "tau"}
    second = {"role": "assistant", "content": "delta", "reasoning": "rho", "thinking": "rho"}
    chat = [user("alpha"), first, user("gamma"), second]
    ids, _ = encode_turns(chat, tokenizer_with(name), "row 0", read=3)
    text = tokenizer_with(name).decode(ids)
    assert "<think>" not in text
    assert text.index("beta") < text.index("gamma") < text.index("rho") < text.index("delta")
    assert text.count("rho") == 1
    prompt = tokenizer_with(name).decode(encode(chat[:3], tokenizer_with(name)))
    assert "tau" not in prompt
    with pytest.raises(ValueError, match=r"thoughts of message 1 \(assistant\)"):
        encode_turns(chat, tokenizer_with(name), "row 0", read=1)
    with pytest.raises(ValueError, match="reasoning and thinking differ"):
        encode([*chat[:3], second | {"thinking": "phi"}], tokenizer_with(name))


def test_thoughts_stay_before_calls() -> None:
    chat = calls({"x": 1})
    chat[1]["reasoning_content"] = "tau"
    text = tokenizer_with("gemma4").decode(encode(chat, tokenizer_with("gemma4"), tools=TOOLS))
    assert text.index("alpha") < text.index("tau") < text.index("call:add") < text.index("omega")
    with pytest.raises(ValueError, match="thoughts before them"):  # which v2 does not read
        encode_turns(chat[:2], tokenizer_with("gemma4_v2"), "row 0", read=1)


def test_marks_of_thoughts_and_calls_may_be_special_tokens() -> None:
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = bytes_tokenizer(tokenizer_with("qwen3").chat_template, "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    said = '<think>\ntau\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>'
    chat = [user("<think>"), {"role": "assistant", "content": said}]
    ids, mask = encode_turns(chat, tokenizer, "row 0", assistant_only=True)
    for name in names:  # the user's is only text
        assert ids.count(tokenizer.convert_tokens_to_ids(name)) == 1
    learnt = [i for i, on in zip(ids, mask, strict=True) if on]
    assert tokenizer.decode(learnt) == f"{said}<|im_end|>"


def test_thoughts_that_are_learnt_may_not_be_left_out() -> None:
    said = "<think>\ntau\n</think>\n\nbeta"
    turns = [user("a"), {"role": "assistant", "content": said}] * 2
    with pytest.raises(ValueError, match=r"row 0.* thoughts of message 1 \(assistant\)"):
        encode_turns(turns, tokenizer_with("qwen3"), "row 0")
    turns[1] = {**turns[1], "weight": 0}
    ids, mask = encode_turns(turns, tokenizer_with("qwen3"), "row 0", assistant_only=True)
    learnt = [i for i, on in zip(ids, mask, strict=True) if on]
    assert tokenizer_with("qwen3").decode(learnt) == f"{said}<|im_end|>"
