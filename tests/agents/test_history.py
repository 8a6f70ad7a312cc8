"""Histories that agents send back: sampled ids are carried, whatever the template does."""

import re
from dataclasses import replace
from functools import cache
from importlib.resources import files

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_pg.agents import formats
from rlhf_pg.agents.history import History, PolicyAnswer, TokenTree
from rlhf_pg.data.chat import encode
from rlhf_pg.rollout import Completion

# Templates that trl ships, and the token that ends a turn.
ENDS = {
    "gemma": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
    "deepseek_r1_distill": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
# Templates that show an earlier turn otherwise than they opened it, even without reasoning.
REWRITES = {
    *("deepseek_r1_distill", "glm4moe", "gptoss", "nemotron_3_nano", "qwen3_5_think", "smolvlm")
}
WORDS = (
    "Yes, sir.",
    "<think>Is it?</think>\n\nNo, never.",
    " perhaps \n",
    "<think>Ça?</think>\n\n🙂 Ça va 🙂",
)


@cache
def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    text = files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
    return bytes_tokenizer(text, ENDS[template])


def bytes_tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    """Bytes with a few merges, so that a text has several tokenisations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Y", "e"), ("Ye", "s"), ("Ġ", "s"), ("i", "r"), ("N", "o"), ("Ċ", "Ċ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = {*re.findall(r"<[|\uff5c][^<>|\uff5c\s]+[|\uff5c]>", template), end}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token="<bos>",
        additional_special_tokens=[AddedToken(name, special=True) for name in sorted(found)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def as_part(message: dict) -> dict:
    """As templates of models with images read a message."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def say(
    history: History, chat: list, words: str, whole: bool = True, ids: list[int] | None = None
) -> PolicyAnswer:
    """Answer a call letter by letter, as the tokenizer itself would not."""
    tokenizer = history.tokenizer
    ids = ids or [i for letter in words for i in tokenizer(letter)["input_ids"]]
    tokens = [*ids, tokenizer.eos_token_id] if whole else ids
    number = (len(history.answers), 0)
    answer = PolicyAnswer(
        number=number,
        name=str(number[0]),
        chat=chat,
        prompt=history.encode_chat(chat),
        completion=Completion(tokens, [-1.0] * len(tokens), "stop" if whole else "length"),
        words=ids,
        content=words,
    )
    history.answers.append(answer)
    return answer


def branches(answers: list[PolicyAnswer]) -> int:
    tree = TokenTree()
    for answer in answers:
        tree.add(answer)
    return sum(before != place - 1 for place, before in enumerate(tree.follows))


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("template", ENDS)
def test_what_was_said_keeps_its_ids(template: str, words: str) -> None:
    """The text is the template's, which may leave out reasoning or strip; no id is encoded anew."""
    tokenizer = tokenizer_with(template)
    history, chat = History(tokenizer, [tokenizer.eos_token_id]), []
    for question in "abc":
        chat = [*chat, {"role": "user", "content": question}]
        answer = say(history, chat, words)
        asked = [as_part(message) for message in chat] if template == "smolvlm" else chat
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(answer.prompt) == text
        chat = [*chat, {"role": "assistant", "content": words}]
    assert history.encoded_again == 0
    if words == WORDS[0]:
        assert branches(history.answers) == (2 if template in REWRITES else 0)


def test_special_tokens_of_a_call_keep_their_ids() -> None:
    tokenizer = bytes_tokenizer(tokenizer_with("qwen2_5").chat_template, "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    history = History(tokenizer, [tokenizer.eos_token_id], skip_special_tokens=False)
    ask = {"role": "user", "content": "a"}
    said = "Yes <tool_call>No</tool_call>"
    parts = ("Y", "es ", "<tool_call>", "No", "</tool_call>")
    ids = [i for part in parts for i in encode(part, tokenizer)]
    say(history, [ask], said, ids=ids)
    second = say(history, [ask, {"role": "assistant", "content": said}, ask], "No")
    assert str(ids)[1:-1] in str(second.prompt)
    assert history.encoded_again == 0


def test_edited_histories_branch() -> None:
    tokenizer = tokenizer_with("qwen2_5")
    history = History(tokenizer, [tokenizer.eos_token_id])
    ask = [{"role": "user", "content": "a"}]
    first = say(history, ask, "Yes")
    chat = [
        *ask,
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "<|im_end|>"},
    ]
    second = say(history, chat, "No")
    assert second.prompt[: len(first.prompt) + 4] == [*first.prompt, *first.completion.tokens]
    # Shortened: the later turn is there, with its ids; a text of the agent's has the tokenizer's.
    short = say(history, [*chat[-1:], {"role": "assistant", "content": "No"}, *ask], "So")
    assert [*second.words, tokenizer.eos_token_id] == list(second.completion.tokens)
    assert str(second.words)[1:-1] in str(short.prompt)
    other = history.encode_chat([*ask, {"role": "assistant", "content": "Yes!"}, *ask])
    assert encode("Yes", tokenizer)[0] in other
    assert history.encoded_again == 0
    assert branches(history.answers) == 1


def test_of_equal_answers_the_one_to_this_prompt_is_found() -> None:
    tokenizer = tokenizer_with("qwen2_5")
    history = History(tokenizer, [tokenizer.eos_token_id])
    chats = [[{"role": "user", "content": letter}] for letter in "ab"]
    say(history, chats[0], "Yes")
    merged = encode("Yes", tokenizer)
    answer = say(history, chats[1], "Yes")
    history.answers[1] = replace(
        answer, words=merged, completion=Completion(merged, [0.0], "length")
    )
    again = {"role": "assistant", "content": "Yes"}
    ids = history.encode_chat([*chats[1], again, *chats[0]])
    assert ids[: len(answer.prompt) + 1] == [*answer.prompt, *merged]


def test_tokens_that_an_agent_cut_are_counted() -> None:
    tokenizer = tokenizer_with("qwen2_5")
    history = History(tokenizer, [tokenizer.eos_token_id])
    ask, merged = [{"role": "user", "content": "a"}], encode("Yes", tokenizer)
    answer = say(history, ask, "Yes", whole=False)
    history.answers[0] = replace(answer, words=merged, content="Ye")
    history.encode_chat([*ask, {"role": "assistant", "content": "Ye"}, *ask])
    assert history.encoded_again == 1


def test_texts_carry_ids_too() -> None:
    tokenizer = tokenizer_with("qwen2_5")
    history = History(tokenizer, [tokenizer.eos_token_id])
    answer = say(history, [{"role": "user", "content": "a"}], "Yes", whole=False)
    history.answers[0] = replace(answer, chat="a: ", prompt=[1, 2])
    assert history.encode_text("a: Yes no") == [1, 2, *answer.words, *encode(" no", tokenizer)]
    assert history.encode_text("a: No") == encode("a: No", tokenizer)


@pytest.mark.parametrize("template", ["qwen2_5", "gptoss", "deepseek_r1_distill"])
def test_rules_of_a_developer_reach_the_policy(template: str) -> None:
    """Agents send them beside the instructions, whatever roles a template knows."""
    tokenizer = tokenizer_with(template)
    asked = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    system = {"role": "system", "content": "Be brief."}
    for chat in (asked, [system, *asked], formats.of_items([{"type": "message", **asked[0]}])):
        ids = History(tokenizer, [tokenizer.eos_token_id]).encode_chat(formats.plain(chat))
        text = tokenizer.decode(ids)
        assert all(message["content"] in text for message in chat)
