"""Render chats with a chat template, and check that it shows every word of them.

What a template does not read vanishes without an error: a role, a field, a part of the content.
So every word of a chat gets a mark, and each mark has to come back from the rendered text.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import show, tell
from rlhf_pg.config.inputs import DataConfig
from rlhf_pg.data.messages import (
    THOUGHTS,
    WEIGHTS,
    Arguments,
    Chat,
    Message,
    Schemas,
    normalise,
    without_weights,
)
from rlhf_pg.data.template_bounds import bounded

logger = logging.getLogger(__name__)

# Marks the end of the assistant's words in a rendered chat: private characters, no whitespace.
MARK = "\ue000\ue001\ue002"
# Marks a word by its number.
WORD = re.compile("\ue000([0-9]+)\ue001")
# Where words are marked: at their ends, but not behind a tag, by which templates split a text.
GAP = re.compile(r"(?<=[^\s>\]])(?=\s|[<\[]|\Z)")
END = re.compile(r"(?<=\S)(?=\s*\Z)")
# Replaces the name of a special token in a message by its number.
QUOTE = re.compile("\ue003([0-9]+)\ue004")
# Roles are not quoted, since templates compare them, even if a special token has the same name.
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of messages and calls that are not for the model.
IDENTIFIERS = ("role", "id", "tool_call_id", "call_id", "type", "index")
OPEN = "<think>"
CLOSE = "</think>"
# Special tokens that the assistant writes itself around thoughts and calls.
TAGS = (OPEN, CLOSE, "<tool_call>", "</tool_call>")
AFTER_EMPTY = re.compile(rf"{OPEN}\s*{CLOSE}\s*{OPEN}")
# What `strftime` may be asked for.
CODES = [f"%{flag}{code}" for flag in ("", "-") for code in "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZ"]
# The tokenizer's attributes that `set_template` sets.
ARGUMENTS = "chat_template_kwargs"
DATE = "chat_template_date"
OF_TOOLS = -1  # the number of the message of a word that is in a schema

Lose = Callable[[Chat], tuple[list["Word"], ValueError | None]]


class ShownChat(NamedTuple):
    """A chat in the form in which its template shows it."""

    messages: Chat  # quoted for `render`
    hides_last: bool  # the template leaves out thoughts of the last message


class Word(NamedTuple):
    """A marked word: the number of its message, and the field that it is in."""

    message: int
    field: str
    number: int
    is_thought: bool = False


def set_template(tokenizer: PreTrainedTokenizerBase, args: DataConfig) -> None:
    """Give a tokenizer the config's chat template, its arguments, and the date that it prints;
    ValueError if there is no such template.
    """
    name = args.chat_template
    known = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if name is not None and ("{%" in name or "{{" in name):
        tokenizer.chat_template = name
    elif name is not None and Path(name).is_file():
        tokenizer.chat_template = Path(name).read_text(encoding="utf-8-sig")
    elif name is not None and name in known:
        tokenizer.chat_template = known[name]
    elif name is not None:
        names = ", ".join(known) or "none by name"
        raise ValueError(
            f"chat_template {show(name)} is neither a file nor one that the tokenizer has ({names})"
        )
    set_template_arguments(tokenizer, args.chat_template_kwargs)
    setattr(tokenizer, DATE, args.chat_template_date)


def set_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> None:
    setattr(tokenizer, ARGUMENTS, dict(arguments))


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> str:
    """Return the chat template, which prints the run's date instead of today's."""
    text: str = tokenizer.get_chat_template(tools=list(tools) or None)
    if (day := getattr(tokenizer, DATE, None)) and prints_date(tokenizer):
        moment = datetime.fromisoformat(day)
        parts = "".join(f"|replace({code!r}, {moment.strftime(code)!r})" for code in CODES)
        clock = f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}\n"
        text = clock + text  # whose end of line is not printed
    return text


def prints_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template prints the date of the day on which it is used."""
    return "strftime_now" in str(tokenizer.chat_template)


def template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return getattr(tokenizer, ARGUMENTS, None) or {}


# ------------------------------------------------------------------------ whether all is shown


def known_roles(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    tools: Schemas = (),
    count: int = 0,
) -> tuple[Chat, int]:
    """Return normal messages in roles that the chat template shows: OpenAI's newer `developer` as
    `system`, joined to a system message before it; and how many the first `count` are then.
    """
    if not any(message["role"] == "developer" for message in chat):
        return chat, count
    try:
        prepare(without_weights(chat), tokenizer, where, tools)
    except ValueError:
        _say_developer()
        return _developer_as_system(chat), len(_developer_as_system(chat[:count]))
    return chat, count


def prepare(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    tools: Schemas = (),
    learnt: Collection[int] = (),
) -> ShownChat:
    """Return messages, quoted, in the form in which the chat template shows all their words.

    Templates differ in the form that they read (`FORMS`): the first that loses nothing is taken.
    Most leave out the thoughts of earlier turns, as the policy never sees them again; for others
    see `_insert_thoughts`.

    Args:
        learnt: numbers of the assistant's messages that must not lose their thoughts, since they
            are learnt. The last message may: `last_turn` has it whole.

    Raises:
        ValueError: the template does not show a word, with its message and role.
    """
    unquoted = normalise(messages, where)
    chat = quote(unquoted, tokenizer, where)
    lose = partial(_lost_words, tokenizer=tokenizer, where=where, tools=tools)
    lost, error = lose(chat)
    for form in FORMS:
        if error is None and all(word.is_thought for word in lost):
            chat, lost = _insert_thoughts(chat, lost, lose)
            break
        other = form(chat)
        others, failure = lose(other)
        if (failure is not None, len(others)) < (error is not None, len(lost)):
            chat = other
            lost = others
            error = failure
    if error is not None:
        raise error
    last = len(chat) - 1
    must_show = {*learnt} - {last}
    for word in lost:
        if not word.is_thought or word.message in must_show:
            raise ValueError(_explain(word, unquoted, where))
    hides_last = any(word.message == last for word in lost)
    return ShownChat(chat, hides_last)


def _insert_thoughts(chat: Chat, lost: list[Word], lose: Lose) -> tuple[Chat, list[Word]]:
    """Move thoughts that the template does not show into the field that most read, or else into
    the content; return the chat, and the words that it does not show then.

    A thought stays where it is if the template shows it there in a chat that ends with its message.
    """
    for field in (THOUGHTS[0], None):
        shows = dict[bool, bool]()  # by whether a message has calls, as some templates differ there
        for number in {word.message for word in lost}:
            has_calls = "tool_calls" in chat[number]
            if has_calls not in shows:
                others, error = lose(chat[: number + 1])
                shows[has_calls] = error is None and number not in {w.message for w in others}
        wrong = {w.message for w in lost if not shows["tool_calls" in chat[w.message]]}
        other = [_move_thoughts(m, field) if n in wrong else m for n, m in enumerate(chat)]
        others, error = lose(other) if other != chat else (lost, None)
        if error is None and len(others) < len(lost):
            chat = other
            lost = others
    return chat, lost


def _lost_words(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, tools: Sequence[Any]
) -> tuple[list[Word], ValueError | None]:
    """Return the words that the template does not show, or the error that it raises.

    A thought behind the calls that follow from it is not shown.
    """
    marked, words = mark_chat(chat)
    open_turn = chat[-1]["role"] != "assistant"
    try:
        text = render(tokenizer, marked, where, open_turn, _mark_tools(tools, words))
    except ValueError as error:
        return words, error
    seen = set[Word]()
    called = set[int]()  # messages whose calls were shown already
    for number in WORD.findall(text):
        word = words[int(number)]
        if word.field == "tool_calls":
            called.add(word.message)
        if not (word.is_thought and word.message in called):
            seen.add(word)
    lost = [word for word in words if word not in seen]
    for key, name in _words_of_schema(tools):  # some templates name functions only
        if name.strip() not in text and json.dumps(name.strip())[1:-1] not in text:
            _say_hidden(key)
    for thought in AFTER_EMPTY.finditer(text):
        if mark := WORD.search(text, thought.end()):
            lost.append(words[int(mark[1])])
    # If the end of a turn is shown, what is left out before it are thoughts.
    ends = {word.message: word for word in words if word.field == "content"}
    for index, word in enumerate(lost):
        of_assistant = word.field == "content" and chat[word.message]["role"] == "assistant"
        if of_assistant and ends[word.message] in seen:
            lost[index] = word._replace(is_thought=True)
    return lost, None


def mark_chat(quoted: Chat) -> tuple[Chat, list[Word]]:
    """Mark every word of a chat by its number in the list of words."""
    words: list[Word] = []
    marked = [_mark_message(message, number, words) for number, message in enumerate(quoted)]
    return marked, words


def _mark_message(message: Message, number: int, words: list[Word]) -> Message:
    """Mark every word of a message, and append it to `words`."""
    thinks = message["role"] == "assistant"
    marked = {}
    for field, value in message.items():
        if field in IDENTIFIERS or (field == "name" and message["role"] == "tool"):
            marked[field] = value
        elif field == "content" and isinstance(value, str) and thinks:
            thoughts, close, answer = value.rpartition(CLOSE)
            before = _mark(thoughts, words, number, field, is_thought=True)
            marked[field] = before + close + _mark(answer, words, number, field)
        else:
            is_thought = thinks and field in THOUGHTS
            marked[field] = _mark(value, words, number, field, is_thought)
    return marked


def _mark(
    value: Any,
    words: list[Word],
    message: int,
    field: str,
    is_thought: bool = False,
    is_json: bool = False,
) -> Any:
    """Mark the words of a text, or of all texts in lists and objects."""
    mark = partial(_mark, words=words, message=message, field=field, is_thought=is_thought)

    def number(_: re.Match[str]) -> str:
        words.append(Word(message, field, len(words), is_thought))
        return f"\ue000{len(words) - 1}\ue001"

    if isinstance(value, str):
        gap = GAP if GAP.search(value) else END
        return gap.sub(number, value)
    if isinstance(value, list):
        return [mark(item, is_json=is_json) for item in value]
    if isinstance(value, Arguments) or (is_json and isinstance(value, Mapping)):
        pairs = {mark(key): mark(item, is_json=True) for key, item in value.items()}
        if isinstance(value, Arguments):
            return Arguments(pairs)
        return pairs
    if isinstance(value, Mapping):
        return {k: v if k in IDENTIFIERS else mark(v) for k, v in value.items()}
    if value is not None and not is_json:  # a number that no template reads
        words.append(Word(message, field, len(words)))
    return value


def _mark_tools(tools: Schemas, words: list[Word]) -> Schemas:
    """Mark the names of functions, which every template shows that reads tools."""
    marked = []
    for tool in tools:
        name = _mark(tool["function"]["name"], words, OF_TOOLS, "tools")
        marked.append({**tool, "function": {**tool["function"], "name": name}})
    return marked


def _words_of_schema(schema: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield names of properties, choices and descriptions, each with the key that it is under."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if key == "properties":
                yield key, name
            yield from _words_of_schema(value, name)
    elif isinstance(schema, list | tuple):
        for item in schema:
            yield from _words_of_schema(item, key)
    elif isinstance(schema, str) and key in ("description", "enum"):
        yield key, schema


def _explain(word: Word, chat: Chat, where: str) -> str:
    if word.message == OF_TOOLS:
        return (
            f"{where}: tools: the chat template of the tokenizer does not show them to the model: "
            "choose one that does by chat_template, or leave tools out"
        )
    message = chat[word.message]
    text = show(message.get(word.field, message["content"]))
    of_message = f"of message {word.message} ({message['role']})"
    if word.field in WEIGHTS:
        return f"{where}: {word.field} {of_message} is for what SFT learns: take it out here"
    if word.is_thought:
        return (
            f"{where}: the chat template leaves out the thoughts {of_message}, {text}, if more "
            "messages follow: train on the last turn alone (prompt and completion; or "
            "assistant_only_loss, with weight: 0 in the others), choose a template that shows them "
            "by chat_template, or take them out"
        )
    return (
        f"{where}: the chat template does not show {word.field} {of_message}, {text}: write it as "
        "the template reads it, choose another by chat_template, or take it out"
    )


# ------------------------------------------------------------ forms that templates differ in


def _content_as_part(chat: Chat) -> Chat:
    """Return content as a list of one part, which templates of models with images read."""
    changed = []
    for message in chat:
        if isinstance(message["content"], str):
            part = {"type": "text", "text": message["content"]}
            message = {**message, "content": [part]}
        changed.append(message)
    return changed


def _arguments_as_text(chat: Chat) -> Chat:
    """Return arguments of calls as JSON text, which templates print that do not encode them."""
    renamed = copy.deepcopy(chat)
    for message in renamed:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return renamed


def _developer_as_system(chat: Chat) -> Chat:
    renamed: Chat = []
    for message in chat:
        if message["role"] != "developer":
            renamed.append(message)
        elif renamed and renamed[-1]["role"] == "system":
            both = f"{renamed[-1]['content']}\n\n{message['content']}"
            renamed[-1] = {**renamed[-1], "content": both}
        else:
            renamed.append({**message, "role": "system"})
    return renamed


def _move_thoughts(message: Message, field: str | None = None) -> Message:
    """Return a message with its thoughts in a field, or in front of its content."""
    if message["role"] != "assistant":
        return message
    content = text_of(message)
    moved = {key: value for key, value in message.items() if key not in THOUGHTS}
    thoughts = "".join(message[key] for key in THOUGHTS if isinstance(message.get(key), str))
    if not thoughts and CLOSE in content:
        thoughts, _, content = content.rpartition(CLOSE)
        thoughts = thoughts.strip().removeprefix(OPEN).strip()
        content = content.lstrip()
    if not thoughts:
        return message
    if field is None:
        content = f"{OPEN}\n{thoughts}\n{CLOSE}\n\n{content}"
    else:
        moved[field] = thoughts
    is_text = isinstance(message["content"], str)
    moved["content"] = content if is_text else [{"type": "text", "text": content}]
    return moved


# With nothing changed at the end, for what the others have mended.
FORMS = (_content_as_part, _arguments_as_text, list)


@lru_cache
def _say_hidden(key: str) -> None:
    logger.warning("tools: the chat template does not show all that is under %r in schemas", key)


@lru_cache(maxsize=1)
def _say_developer() -> None:
    logger.warning("the chat template has no role developer: its messages are of the role system")


# ------------------------------------------------------------------------------- the last turn


def last_turn(
    chat: ShownChat, tokenizer: PreTrainedTokenizerBase, where: str, tools: Sequence[Any] = ()
) -> tuple[str, str]:
    """Return a chat through the last words, which are the assistant's, and what ends the turn.

    Thoughts that the template hides follow the opening of the turn, as in a rollout. ValueError if
    the template does not show the words, or opens the turn with an empty thought before others.
    """
    *before, turn = chat.messages
    closed = render(tokenizer, [*before, with_mark(turn)], where, False, tools)
    text, mark, end = closed.rpartition(MARK)
    if not mark:
        raise ValueError(f"{where}: the chat template does not show the assistant's last message")
    if not chat.hides_last:
        return text, end
    if not all(call["function"]["name"] in end for call in turn.get("tool_calls", ())):
        raise ValueError(
            f"{where}: the chat template shows the calls of the last message, but not the thoughts "
            "before them: choose another by chat_template, or take the thoughts out"
        )
    opening = render(tokenizer, before, where, True, tools)
    words = text_of(_move_thoughts(turn))
    if opening.rstrip().endswith(OPEN):
        words = words.removeprefix(OPEN).lstrip("\n")
    elif opening.rstrip().endswith(CLOSE):
        raise ValueError(
            f"{where}: the chat template opens the assistant's turn with an empty thought, but its "
            "last message has thoughts: set chat_template_kwargs {enable_thinking: true}, or take "
            "the thoughts out"
        )
    return opening + words, end


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that end a turn in the chat template, perhaps none."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        _, end = last_turn(prepare(chat, tokenizer, "a turn"), tokenizer, "a turn")
    except ValueError:  # there is no template, or it does not take this chat
        return []
    names = special_tokens(tokenizer).found.findall(end)
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def warn_of_turn_end(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> None:
    """Say if no token that ends a turn in the chat template ends a completion."""
    ends = turn_ends(tokenizer)
    if ends and not set(ends) & set(stops):
        logger.warning(
            "eos_token: the chat template ends a turn by %r, but completions end at %s: set "
            "eos_token to %r if the model was trained with this template",
            tokenizer.decode(ends[:1]),
            ", ".join(repr(tokenizer.decode([stop])) for stop in stops),
            tokenizer.decode(ends[:1]),
        )


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or the texts of its parts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def with_mark(message: Message, mark: str = MARK) -> Message:
    """Return a message with a mark behind its content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + mark}]}


# ----------------------------------------------------------------------------------- rendering


def render(
    tokenizer: PreTrainedTokenizerBase,
    quoted: Chat,
    where: str,
    open_turn: bool = False,
    tools: Schemas = (),
) -> str:
    """Render quoted chat messages with the chat template, for `tokenize_chat`."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{where} is a list of messages, but the tokenizer has no chat_template: set this key "
            "to a file with one"
        )
    of_date = {}
    if getattr(tokenizer, DATE, None):
        of_date["chat_template"] = template_of(tokenizer, tools)
    try:
        chat: str = bounded(
            partial(
                tokenizer.apply_chat_template,
                quoted,
                tools=list(tools) or None,
                add_generation_prompt=open_turn,
                tokenize=False,
                **of_date,
                **template_arguments(tokenizer),
            )
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(f"{where} does not fit the chat template: {tell(error)}") from error
    return chat


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer."""

    names: list[str]  # a `QUOTE` has an index of this list
    found: re.Pattern[str]  # any of the names
    ids: set[int]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    return _special_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> SpecialTokens:
    """Return a tokenizer's special tokens; `size` renews the cache when tokens are added."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Longer names come before their prefixes. Marks and quotes in a text are quoted too.
    names = sorted({*added.values(), MARK[0], "\ue003"}, reverse=True)
    found = re.compile("|".join(map(re.escape, names)))
    return SpecialTokens(names, found, set(added))


def quote(value: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Any:
    """Copy messages with a `QUOTE` in place of every special token's name, but for those by which
    the assistant marks its own thoughts and calls.
    """
    try:
        return _quote(value, special_tokens(tokenizer))
    except Exception as error:
        raise ValueError(f"{where} cannot be read: {tell(error)}") from error


def _quote(value: Any, special: SpecialTokens, unquoted: Collection[str] = ()) -> Any:
    if isinstance(value, list | tuple):
        return [_quote(item, special) for item in value]
    if isinstance(value, Mapping):
        is_assistant = value.get("role") == "assistant"
        quoted = {}
        for key, item in value.items():
            if key != "role" or item not in ROLES:
                tags = TAGS if is_assistant and key == "content" else ()
                item = _quote(item, special, tags)
            quoted[_quote(key, special)] = item
        if isinstance(value, Arguments):
            return Arguments(quoted)
        return quoted
    if value is not None and not isinstance(value, str | int | float):
        value = str(value)  # as a template would render it
    if not isinstance(value, str):
        return value

    def quote_name(match: re.Match[str]) -> str:
        name = match.group()
        if name in unquoted:
            return name
        return f"\ue003{special.names.index(name)}\ue004"

    return special.found.sub(quote_name, value)
