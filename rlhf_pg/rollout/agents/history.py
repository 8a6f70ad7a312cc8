"""The tokens of an agent's episode: sampled ids are kept, and none is encoded a second time.

An agent sends its history as text: all of it, a part, or another version. The policy's own words
are found in it and get the ids that were sampled; the rest is encoded. Calls that begin alike then
have the same ids there, and an episode is a tree of tokens.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile, zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.chat import encode, tokenize, tokenize_chat
from rlhf_pg.data.messages import normalise
from rlhf_pg.data.rendering import MARK, known_roles, prepare, quote, render, with_mark
from rlhf_pg.rollout.engine import Completion
from rlhf_pg.rollout.multi_turn.tools import TAGGED, ToolCall

END = re.compile(f"{MARK[0]}([0-9]+){MARK[1]}")  # marks the end of a message, with its place
WHERE = "the history of a call"
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the tokens of a character


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The policy's answer to a call."""

    number: tuple[int, ...]  # orders the calls of an episode by their creation
    name: str  # the number with that of the episode
    chat: Any  # the messages or the text of the call
    prompt: Sequence[int]
    completion: Completion
    words: Sequence[int]  # the sampled ids without the one that ended them
    content: str  # the words as the agent gets them, up to a stop string, or with calls of tools
    tools: tuple[ToolCall, ...] = ()

    @property
    def calls(self) -> tuple[str, ...]:
        """The ids of the calls of tools, by which an agent names them."""
        return tuple(f"call_{self.name}-{i}" for i in range(len(self.tools)))

    @property
    def visible(self) -> tuple[str | None, list[Any]]:
        """The text that the agent gets, and names and arguments of calls of tools."""
        if not self.tools:
            return self.content, []
        # After the last closing tag, the regex would search from each opening tag to the end.
        closed, tag, rest = self.content.rpartition("</tool_call>")
        said, calls = TAGGED.subn("", closed + tag)
        text = (said + rest).strip() if calls else ""
        return text or None, [(tool.name, tool.arguments) for tool in self.tools]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of OpenAI's."""
        text, tools = self.visible
        calls = [
            {"id": i, "type": "function", "function": {"name": x, "arguments": json.dumps(y)}}
            for i, (x, y) in zip(self.calls, tools, strict=True)
        ]
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


@dataclass
class History:
    """What the policy has said in an episode so far."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    answers: list[Answer] = field(default_factory=list)
    encoded_again: int = 0  # tokens of what the policy has said
    skip_special_tokens: bool = True  # in the text of an answer without calls

    def _words(self, answer: Answer, text: str) -> list[int]:
        """Return the first ids of an answer, which are its `text`; none if a token is cut."""
        words = list(answer.words)
        decode = self._decode(answer)
        last = bisect_left(
            range(len(words)), len(text), key=lambda i: len(decode(words[:i]).rstrip(HALF))
        )
        if decode(words[:last]) == text:
            return words[:last]
        return []

    def _decode(self, answer: Answer) -> Callable[[list[int]], str]:
        skips = self.skip_special_tokens and not answer.calls
        return partial(self.tokenizer.decode, skip_special_tokens=skips)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, which may begin with an earlier prompt and its answer."""
        begun = ""
        ids = list[int]()
        for answer in self.answers:
            asked = answer.chat
            whole = asked if isinstance(asked, str) else self.tokenizer.decode(answer.prompt)
            whole += answer.content
            longer = len(whole) > len(begun) and text.startswith(whole)
            if longer and (words := self._words(answer, answer.content)):
                begun = whole
                ids = [*answer.prompt, *words]
        if not begun:
            return encode(text, self.tokenizer, what=WHERE)
        rest = text.removeprefix(begun)
        return ids + tokenize(self.tokenizer, rest, WHERE, add_special_tokens=False)["input_ids"]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of messages, through the opening of the assistant's next turn.

        Reasoning that the template leaves out of earlier turns is left out here too. ValueError if
        the messages do not fit the template.
        """
        chat, _ = known_roles(normalise(messages, WHERE), self.tokenizer, WHERE, tools)
        known: dict[int, list[Answer]] = {}
        for place, message in enumerate(chat):
            if message["role"] == "assistant":
                calls = message.get("tool_calls", [])
                names = tuple(call.get("id") for call in calls)
                same = [answer for answer in self.answers if answer.calls == names]
                functions = [call["function"] for call in calls]
                tools_called = [(called["name"], called["arguments"]) for called in functions]
                sent = message["content"] or None, tools_called
                if calls and same and sent == same[0].visible:
                    chat[place] = {"role": "assistant", "content": same[0].content}
                content = chat[place]["content"]
                known[place] = [answer for answer in same if content and answer.content == content]
        quoted = prepare(chat, self.tokenizer, WHERE, tools).messages
        whole = render(self.tokenizer, quoted, WHERE, True, tools)
        for strips in (False, True):  # many templates strip what was said
            marked = list(quoted)
            for place in filter(known.get, known):
                message = quoted[place]
                if strips and isinstance(message["content"], str):
                    message = {**message, "content": message["content"].strip()}
                marked[place] = with_mark(message, f"{MARK[0]}{place}{MARK[1]}")
            text = render(self.tokenizer, marked, WHERE, True, tools)
            if END.sub("", text) == whole:
                break
        else:
            text = whole
        ids = list[int]()
        pieces = END.split(text)[::2]
        places = END.findall(text)
        for piece, place in zip_longest(pieces, places):
            if place is None:
                ids = ids + tokenize_chat(self.tokenizer, piece, WHERE)
                break
            found = [self._find(ids, piece, answer, strips) for answer in known[int(place)]]
            _, ids, again = max(found, key=lambda one: one[0])
            self.encoded_again += again
        if ids[:2] == [self.tokenizer.bos_token_id] * 2:
            return ids[1:]
        return ids

    def _find(
        self, ids: list[int], piece: str, answer: Answer, strips: bool
    ) -> tuple[bool, list[int], int]:
        """Find an answer's words at the end of a piece of a chat, which follows `ids`.

        Return whether the ids before the words are those that it answers; the ids through the
        words; how many of the words were encoded.
        """
        wanted = answer.content.rstrip() if strips else answer.content
        decode = self._decode(answer)
        words = self._words(answer, wanted)

        def quoted(first: int) -> str:
            return self._quote(decode(words[first:]))

        places = range(len(words))
        first = bisect_left(places, True, key=lambda i: piece.endswith(quoted(i).lstrip(HALF)))
        while not piece.endswith(quoted(first)):
            first += 1
        own = quoted(first)
        before = piece.removesuffix(own)
        lead = ids + tokenize_chat(self.tokenizer, before, WHERE)
        rest = self._quote(wanted).removesuffix(own)
        lost = before[len(before) - common(before[::-1], rest[::-1]) :].strip()
        again = len(tokenize_chat(self.tokenizer, lost, WHERE))
        return lead == list(answer.prompt), lead + words[first:], again

    def _quote(self, said: str) -> str:
        message = {"role": "assistant", "content": said}
        return str(quote(message, self.tokenizer, WHERE)["content"])


def common(a: Iterable[Any], b: Iterable[Any]) -> int:
    """Return how many entries two sequences have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class TokenTree:
    """The distinct tokens of an episode, in the order of its calls.

    Attributes:
        follows: the place of the token that each token follows, -1 if it follows nothing.
        actions: which tokens the policy sampled.
        lines: the line of the call that each token came with.
        ends: the place of the last token of each answer.
    """

    def __init__(self) -> None:
        self.tokens, self.follows, self.ends = list[int](), list[int](), list[int]()
        self.logprobs, self.actions, self.lines = list[float](), list[bool](), list[int]()
        self._next: dict[tuple[int, int], list[int]] = {}

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return how many of these ids are there from the start, and the place of the last."""
        places = [-1]
        length = 0
        for length, token in enumerate(ids):
            following = [x for place in places for x in self._next.get((place, token), ())]
            if not following:
                return length, places[0]
            places = following
        return len(ids), places[0]

    def add(self, answer: Answer, line: int = 0) -> None:
        """Add what is new in the prompt, and the whole answer: it was sampled anew."""
        known, last = self.find(answer.prompt)
        context = list(answer.prompt[known:])
        completion = answer.completion
        self.logprobs += [0.0] * len(context) + completion.logprobs
        self.actions += [False] * len(context) + [True] * len(completion.tokens)
        self.lines += [line] * len(context + completion.tokens)
        for token in context + completion.tokens:
            place = len(self.tokens)
            self._next.setdefault((last, token), []).append(place)
            self.tokens.append(token)
            self.follows.append(last)
            last = place
        self.ends.append(last)
