"""The tokens of an agent's episode: sampled ids are kept, and none is encoded a second time.

An agent sends its history as text: all of it, a part, or another version. The policy's own words
are found in it and get the ids that were sampled; the rest is encoded. Calls that begin alike then
have the same ids there, and an episode is a tree of tokens.
"""

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.data.chat import encode, tokenize, tokenize_chat
from rlhf_pg.data.messages import normalise
from rlhf_pg.data.rendering import MARK, known_roles, prepare, quote, render, with_mark
from rlhf_pg.episodes.tools import TAGGED, ToolCall
from rlhf_pg.rollout.engine import Completion

Json = dict[str, Any]  # an object
END = re.compile(f"{MARK[0]}([0-9]+){MARK[1]}")  # marks the end of a message, with its place
WHERE = "the history of a call"
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from some of the tokens of a character


@dataclass(frozen=True, kw_only=True)
class PolicyAnswer:
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
        closed, tag, after = self.content.rpartition("</tool_call>")
        before, count = TAGGED.subn("", closed + tag)
        text = ""
        if count:
            text = (before + after).strip()
        calls = [(tool.name, tool.arguments) for tool in self.tools]
        return text or None, calls

    @property
    def message(self) -> Json:
        """The answer as a message of OpenAI's."""
        text, _ = self.visible
        message: Json = {"role": "assistant", "content": text}
        if self.tools:
            message["tool_calls"] = [
                {
                    "id": call,
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "arguments": json.dumps(tool.arguments),
                    },
                }
                for call, tool in zip(self.calls, self.tools, strict=True)
            ]
        return message


@dataclass
class History:
    """What the policy has said in an episode so far."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    answers: list[PolicyAnswer] = field(default_factory=list)
    encoded_again: int = 0  # tokens of what the policy has said
    skip_special_tokens: bool = True  # in the text of an answer without calls

    def _words(self, answer: PolicyAnswer, text: str) -> list[int]:
        """Return the first ids of an answer, which are its `text`; none if a token is cut."""
        words = list(answer.words)

        def length(count: int) -> int:
            decoded = self._decode(answer, words[:count])
            return len(decoded.rstrip(HALF))

        count = bisect_left(range(len(words)), len(text), key=length)
        words = words[:count]
        if self._decode(answer, words) == text:
            return words
        return []

    def _decode(self, answer: PolicyAnswer, ids: list[int]) -> str:
        skips = self.skip_special_tokens and not answer.tools
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skips)
        return text

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, which may begin with an earlier prompt and its answer."""
        begun = ""
        ids = list[int]()
        for answer in self.answers:
            asked = answer.chat
            if not isinstance(asked, str):
                asked = self.tokenizer.decode(answer.prompt)
            start = asked + answer.content
            if len(start) <= len(begun) or not text.startswith(start):
                continue
            if words := self._words(answer, answer.content):
                begun = start
                ids = [*answer.prompt, *words]
        if not begun:
            return encode(text, self.tokenizer, what=WHERE)
        new = text.removeprefix(begun)
        encoded = tokenize(self.tokenizer, new, WHERE, add_special_tokens=False)
        return ids + encoded["input_ids"]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Json] = (),
    ) -> list[int]:
        """Return the ids of messages, through the opening of the assistant's next turn.

        Reasoning that the template leaves out of earlier turns is left out here too. ValueError if
        the messages do not fit the template.
        """
        chat = normalise(messages, WHERE)
        chat, _ = known_roles(chat, self.tokenizer, WHERE, tools)
        known = dict[int, list[PolicyAnswer]]()
        for index, message in enumerate(chat):
            if message["role"] == "assistant":
                chat[index], answers = self._recognise(message)
                if answers:
                    known[index] = answers
        quoted = prepare(chat, self.tokenizer, WHERE, tools).messages
        unmarked = render(self.tokenizer, quoted, WHERE, True, tools)
        for strips in (False, True):  # many templates strip what was said
            marked = list(quoted)
            for index in known:
                message = quoted[index]
                content = message["content"]
                if strips and isinstance(content, str):
                    message = {**message, "content": content.strip()}
                mark = f"{MARK[0]}{index}{MARK[1]}"
                marked[index] = with_mark(message, mark)
            text = render(self.tokenizer, marked, WHERE, True, tools)
            if END.sub("", text) == unmarked:
                break
        else:
            text = unmarked
        ids = list[int]()
        *pieces, end = END.split(text)
        for piece, number in zip(pieces[::2], pieces[1::2], strict=True):
            answers = known[int(number)]
            ways = [self._find(ids, piece, answer, strips) for answer in answers]
            _, ids, again = max(ways, key=lambda way: way[0])
            self.encoded_again += again
        ids = ids + tokenize_chat(self.tokenizer, end, WHERE)
        if ids[:2] == [self.tokenizer.bos_token_id] * 2:
            return ids[1:]
        return ids

    def _recognise(self, message: Json) -> tuple[Json, list[PolicyAnswer]]:
        """Return an assistant's message, with calls of tools in the words that were sampled, and
        the answers that it may be.
        """
        calls = message.get("tool_calls", [])
        names = tuple(call.get("id") for call in calls)
        same = [answer for answer in self.answers if answer.calls == names]
        if calls and same:
            functions = [call["function"] for call in calls]
            tools = [(function["name"], function["arguments"]) for function in functions]
            sent = (message["content"] or None, tools)
            if sent == same[0].visible:
                message = {"role": "assistant", "content": same[0].content}
        content = message["content"]
        answers = [answer for answer in same if content and answer.content == content]
        return message, answers

    def _find(
        self,
        ids: list[int],
        piece: str,
        answer: PolicyAnswer,
        strips: bool,
    ) -> tuple[bool, list[int], int]:
        """Find an answer's words at the end of a piece of a chat, which follows `ids`.

        Return whether the ids before the words are those that it answers; the ids through the
        words; how many of the words were encoded.
        """
        wanted = answer.content
        if strips:
            wanted = wanted.rstrip()
        words = self._words(answer, wanted)

        def quoted(first: int) -> str:
            decoded = self._decode(answer, words[first:])
            return self._quote(decoded)

        def ends_with(first: int) -> bool:
            return piece.endswith(quoted(first).lstrip(HALF))

        first = bisect_left(range(len(words)), True, key=ends_with)
        while not piece.endswith(quoted(first)):
            first += 1
        ending = quoted(first)
        before = piece.removesuffix(ending)
        encoded = tokenize_chat(self.tokenizer, before, WHERE)
        lead = ids + encoded
        missing = self._quote(wanted).removesuffix(ending)
        shared = common(reversed(before), reversed(missing))
        lost = before[len(before) - shared :].strip()
        encoded = tokenize_chat(self.tokenizer, lost, WHERE)
        is_answered = lead == list(answer.prompt)
        return is_answered, lead + words[first:], len(encoded)

    def _quote(self, text: str) -> str:
        message = {"role": "assistant", "content": text}
        quoted = quote(message, self.tokenizer, WHERE)
        return str(quoted["content"])


def common(a: Iterable[Any], b: Iterable[Any]) -> int:
    """Return how many entries two sequences have in common at their start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class TokenTree:
    """The distinct tokens of an episode, in the order of its calls.

    Attributes:
        follows: the index of the token that each token follows, -1 if it follows nothing.
        actions: which tokens the policy sampled.
        branches: the branch of the call that each token came with.
        ends: the index of the last token of each answer.
    """

    def __init__(self) -> None:
        self.tokens = list[int]()
        self.follows = list[int]()
        self.ends = list[int]()
        self.logprobs = list[float]()
        self.actions = list[bool]()
        self.branches = list[int]()
        self._next = defaultdict[tuple[int, int], list[int]](list)

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return how many of these ids are there from the start, and the index of the last."""
        indices = [-1]
        for length, token in enumerate(ids):
            following = list[int]()
            for index in indices:
                following += self._next.get((index, token), ())
            if not following:
                return length, indices[0]
            indices = following
        return len(ids), indices[0]

    def add(self, answer: PolicyAnswer, branch: int = 0) -> None:
        """Add what is new in the prompt, and the whole answer: it was sampled anew."""
        known, last = self.find(answer.prompt)
        context = list(answer.prompt[known:])
        completion = answer.completion
        tokens = context + completion.tokens
        self.logprobs += [0.0] * len(context)
        self.logprobs += completion.logprobs
        self.actions += [False] * len(context)
        self.actions += [True] * len(completion.tokens)
        self.branches += [branch] * len(tokens)
        for token in tokens:
            index = len(self.tokens)
            self._next[last, token].append(index)
            self.tokens.append(token)
            self.follows.append(last)
            last = index
        self.ends.append(last)
