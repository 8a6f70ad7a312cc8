"""The policy behind an HTTP endpoint with OpenAI's interface, on loopback.

Every episode has a key of its own. A wrong or forbidden request is answered with a status and a
message; no request ends the run.
"""

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rlhf_pg.agents import formats
from rlhf_pg.agents.connections import KEEP_ALIVE, Connection, raise_file_limit
from rlhf_pg.agents.history import History, Json, PolicyAnswer, common
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.boundary.user_code import once_per_process
from rlhf_pg.data.messages import read_tools
from rlhf_pg.episodes.tools import Toolbox, ToolCall
from rlhf_pg.rng import mix
from rlhf_pg.rollout.engine import Completion, Request
from rlhf_pg.rollout.token_sampling import request_seed

T = TypeVar("T")

MOST_BYTES = 2**23  # of a body
# A body that is longer than its tokens can be is refused before it is read as JSON.
BYTES_PER_TOKEN = 32
BASE_BYTES = 2**16
MOST_CHOICES = 16
ENDED = "no running episode has this key"


class CallRefused(Exception):
    """An answer to a call that is not sampled. Clients try some statuses again, but not 400."""

    def __init__(self, text: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class CallOptions(BaseModel):
    """The fields of a request that count; the run decides on temperature and the like."""

    messages: list[Json] = []
    prompt: str | list[int] | list[str] = ""
    input: str | list[Json] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    logprobs: bool | int | None = None
    stream: bool | None = None
    stream_options: Json | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return list(filter(None, self.stop or ()))


@dataclass(eq=False)
class Agent:
    """The calls of one episode."""

    episode: Any
    seed: int  # of the run
    history: History
    arrivals: SimpleQueue[Any]  # to the thread that samples
    max_tokens: int  # of a branch after its first prompt
    max_calls: int | None  # of a branch
    longest: int | None  # tokens of a prompt and its answer
    timeout: float | None  # seconds for a call
    truncated: bool = False  # by a limit of the run
    overlaps: bool = False  # calls of one branch ran side by side
    closed: bool = False
    responses: dict[str, list[Json]] = field(default_factory=dict)  # messages, by id
    branches: "dict[str, Branch]" = field(default_factory=dict)  # by key
    waiting: "set[Call]" = field(default_factory=set)
    connections: set[Connection] = field(default_factory=set)

    def full(self) -> CallRefused:
        """Return the answer to a call for which there is no room."""
        self.truncated = True
        told = "no tokens of the context length are left"  # words that clients look for
        return CallRefused(told, code="context_length_exceeded")


@dataclass(eq=False)
class Branch:
    """Calls that follow one another: an agent's own, or those of a part that runs beside it.

    Its limits count what was there when it was forked, but not what runs beside it, whose progress
    depends on the clock.
    """

    agent: Agent
    path: tuple[int, ...] = ()
    # Of its calls, and of those before its fork.
    answers: list[PolicyAnswer] = field(default_factory=list)
    calls: int = 0
    tokens: int = 0  # after the first prompt, each counted once
    count: int = 0  # numbers that were given
    open: int = 0

    def next(self) -> tuple[int, ...]:
        self.agent.overlaps |= self.open > 0
        self.count += 1
        return (*self.path, self.count - 1)

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens may be sampled after a prompt; CallRefused if there is no room."""
        agent = self.agent
        if agent.max_calls is not None and self.calls >= agent.max_calls:
            agent.truncated = True
            raise CallRefused(f"an episode has at most {agent.max_calls} calls", code="max_turns")
        room = agent.max_tokens - self.tokens - self.new(prompt)
        if agent.longest is not None:
            room = min(room, agent.longest - len(prompt))
        if room < 1:
            raise agent.full()
        return room

    def new(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt were not there before it; the first is not counted."""
        before = (chain(answer.prompt, answer.completion.tokens) for answer in self.answers)
        known = [common(prompt, tokens) for tokens in before] or [len(prompt)]
        return len(prompt) - max(known)

    def keep(self, answers: Sequence[PolicyAnswer]) -> None:
        """Count the answers to a call, and find their words in later histories."""
        sampled = sum(len(answer.completion.tokens) for answer in answers)
        self.tokens += self.new(answers[0].prompt) + sampled
        self.calls += 1
        self.answers += answers
        self.agent.history.answers += answers


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One completion that an agent waits for."""

    agent: Agent
    number: tuple[int, ...]
    prompt: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    done: Future[Completion] = field(default_factory=Future)

    @cached_property
    def request(self) -> Request:
        episode = self.agent.episode
        return Request(
            tokens=self.prompt,
            prompt_index=episode.prompt_index,
            samples=[episode.sample],
            position=noise(self.number),
            max_tokens=self.max_tokens,
            stop=self.stop,
            cancelled=self.done.cancelled,
        )


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What an agent's program is given to ask the policy with."""

    base_url: str
    api_key: str
    model: str = formats.MODEL
    seed: int  # for the program's own randomness; by the run's seed, prompt, sample and fork
    branch: Branch = field(repr=False)
    server: "EndpointServer" = field(repr=False)

    def fork(self) -> "Endpoint":
        """Return an endpoint for a part of the program that runs beside others.

        Calls side by side at one endpoint are numbered as they arrive, which depends on the clock;
        those at forks are numbered by the order of the forks.
        """
        branch = self.branch
        fork = Branch(
            branch.agent,
            path=branch.next(),
            answers=list(branch.answers),
            calls=branch.calls,
            tokens=branch.tokens,
        )
        return self.server.open(fork)


@once_per_process
def serve(host: str) -> "EndpointServer":
    """Return the server of this process on a host, started at the first call."""
    return EndpointServer(host)


class EndpointServer:
    """Answers the agents of a process, in a thread of its own."""

    def __init__(self, host: str) -> None:
        self.branches: dict[str, Branch] = {}
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", partial(self._answer, self._chat), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, self._text), methods=["POST"]),
            Route("/v1/responses", partial(self._answer, self._response), methods=["POST"]),
        ]
        # One encodes at a time, since a tokenizer has a state, and beside the loop, which answers.
        self.encoder = ThreadPoolExecutor(1, "encoder")
        raise_file_limit()
        listening = socket.create_server((host, 0), backlog=1024)
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_level="critical",
            http=Connection,
            ws="none",
            backlog=256,
            timeout_keep_alive=KEEP_ALIVE,
            lifespan="off",
        )
        for name in ("NO_PROXY", "no_proxy"):  # whom a proxy could not reach
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), host)))
        self.url = f"http://{host}:{listening.getsockname()[1]}/v1"
        run = partial(uvicorn.Server(config).run, sockets=[listening])
        threading.Thread(target=run, name="endpoint", daemon=True).start()

    def open(self, branch: Branch) -> Endpoint:
        """Return an endpoint with a new key; CallRefused if the episode has ended."""
        key = secrets.token_urlsafe(24)
        episode = branch.agent.episode
        if branch.agent.closed:
            raise CallRefused(ENDED, 401, "invalid_api_key")
        self.branches[key] = branch.agent.branches[key] = branch
        seed = request_seed(
            branch.agent.seed,
            episode.prompt_index,
            episode.sample,
            noise(branch.path),
        )
        return Endpoint(
            base_url=self.url,
            api_key=key,
            seed=seed,
            branch=branch,
            server=self,
        )

    def close(self, agent: Agent) -> None:
        """Refuse whatever else the agent asks, and give up what it waits for."""
        agent.closed = True
        for key in agent.branches:
            self.branches.pop(key, None)
        for call in list(agent.waiting):
            call.done.cancel()
        for connection in list(agent.connections):
            connection.loop.call_soon_threadsafe(connection.end_soon)

    # ------------------------------------------------------------------------------ the calls

    async def _answer(
        self,
        answer: Callable[[HttpRequest, Branch, CallOptions], Awaitable[Response]],
        request: HttpRequest,
    ) -> Response:
        """Answer a request, or say what is wrong with it."""
        try:
            branch = self._branch(request)
            agent = branch.agent
            connection = request.state.connection
            connection.agent = agent
            agent.connections.add(connection)
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise CallRefused(f"the body has more than {MOST_BYTES} bytes", 413)
                if agent.longest is not None:
                    most = BASE_BYTES + BYTES_PER_TOKEN * agent.longest
                    if len(body) > most:
                        raise agent.full()
            options = CallOptions.model_validate_json(bytes(body))
            return await answer(request, branch, options)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            key_path = ".".join(map(str, first["loc"]))
            refused = CallRefused(f"{quote(key_path)}: {first['msg']}")
        except CallRefused as known:
            refused = known
        except Exception as other:  # a template, a message of a strange shape, a client that left
            refused = CallRefused(tell(other))
        error = {
            "message": str(refused),
            "type": "invalid_request_error",
            "code": refused.code,
            "param": None,
        }
        return as_json({"error": error}, refused.status)

    def _branch(self, request: HttpRequest) -> Branch:
        key = request.headers.get("authorization", "").rpartition(" ")[2]
        if key not in self.branches:
            raise CallRefused(ENDED, 401, "invalid_api_key")
        return self.branches[key]

    async def _sample(
        self,
        request: HttpRequest,
        branch: Branch,
        options: CallOptions,
        prompt: list[int],
        chat: Any,
        box: Toolbox | None = None,
    ) -> list[PolicyAnswer]:
        """Wait for the answers to a call, and keep them unless the client has left."""
        self._branch(request)  # the episode may have ended while the call was read
        agent = branch.agent
        count = options.n or 1
        room = max(1, branch.room(prompt) // count)
        most = min(room, options.limit or room)
        number = branch.next()
        calls = [
            Call(
                agent=agent,
                number=(*number, i),
                prompt=prompt,
                max_tokens=most,
                stop=tuple(options.stops),
            )
            for i in range(count)
        ]
        answered = False
        branch.open += 1
        agent.waiting.update(calls)
        try:
            for call in calls:
                agent.arrivals.put(call)
            waiting = {asyncio.wrap_future(call.done) for call in calls}
            async with asyncio.timeout(agent.timeout):
                while waiting:
                    _, waiting = await asyncio.wait(waiting, timeout=1.0)
                    if await request.is_disconnected():
                        raise ClientDisconnect
            answered = True
        except TimeoutError:
            raise CallRefused(f"no answer within {agent.timeout:g} s", 504, "timeout") from None
        finally:
            branch.open -= 1
            agent.waiting.difference_update(calls)
            for call in calls:
                call.done.cancel()
            if not answered and branch.count == number[-1] + 1:  # as if it had never been asked
                branch.count -= 1
        self._branch(request)  # the episode may have ended
        answers = [self._read(call, box, chat) for call in calls]
        if most == room and any(x.completion.finish_reason == "length" for x in answers):
            agent.truncated = True  # by the run's limits, not by the program's own
        branch.keep(answers)
        return answers

    def _read(self, call: Call, box: Toolbox | None, chat: Any) -> PolicyAnswer:
        """Turn a completion into an answer, with its calls of tools."""
        history = call.agent.history
        episode = call.agent.episode
        completion = call.done.result()
        words = completion.tokens
        if words[-1] in history.stop_token_ids:
            words = words[:-1]
        raw = history.tokenizer.decode(words)
        content = history.tokenizer.decode(words, skip_special_tokens=history.skip_special_tokens)
        ends = [start for stop in call.stop if (start := content.find(stop)) >= 0]
        tools = list[ToolCall]()
        if box is not None and not ends:
            tools = [tool for tool in box.parse(raw, chat) if tool.error is None]
        numbers = (episode.prompt_index, episode.sample, *call.number)
        return PolicyAnswer(
            number=call.number,
            name="-".join(map(str, numbers)),
            prompt=call.prompt,
            completion=completion,
            words=words,
            content=raw if tools else content[: min(ends, default=None)],
            tools=tuple(tools),
            chat=chat,
        )

    async def _in_executor(self, encode: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.encoder, encode, *arguments)

    def _encode(
        self,
        branch: Branch,
        options: CallOptions,
        sent: Any,
    ) -> tuple[list[Json], list[int], Toolbox | None]:
        """Return messages in plain form, their ids, and what reads calls of their tools."""
        history = branch.agent.history
        messages = formats.plain(sent)
        schemas = read_tools(options.tools, "tools")
        if options.tool_choice == "none" or not schemas:
            return messages, history.encode_chat(messages), None
        box = Toolbox(schemas=schemas, tokenizer=history.tokenizer)
        return messages, history.encode_chat(messages, schemas), box

    def _encode_text(self, history: History, prompt: str | list[int]) -> tuple[list[int], str]:
        """Return the ids and the text of a prompt that is either."""
        if isinstance(prompt, str):
            return history.encode_text(prompt), prompt
        size = len(history.tokenizer)
        if not all(0 <= i < size for i in prompt):
            raise CallRefused("prompt: an id is not in the vocabulary")
        return prompt, history.tokenizer.decode(prompt)

    # ------------------------------------------------------------------------- the three interfaces

    async def _models(self, request: HttpRequest) -> Response:
        model = {
            "id": formats.MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "rlhf_pg",
        }
        return as_json({"object": "list", "data": [model]})

    async def _chat(self, request: HttpRequest, branch: Branch, options: CallOptions) -> Response:
        sent = options.messages
        messages, prompt, box = await self._in_executor(self._encode, branch, options, sent)
        answers = await self._sample(request, branch, options, prompt, messages, box)
        body = formats.of_chat(answers, bool(options.logprobs), branch.agent.history.tokenizer)
        usage = bool((options.stream_options or {}).get("include_usage"))
        if options.stream:
            return events(formats.chat_chunks(body, usage))
        return as_json(body)

    async def _text(self, request: HttpRequest, branch: Branch, options: CallOptions) -> Response:
        history = branch.agent.history
        prompt = options.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not prompt or (isinstance(prompt, list) and isinstance(prompt[0], str)):
            raise CallRefused("prompt: one text, or a list of token ids, is needed")
        ids, text = await self._in_executor(self._encode_text, history, prompt)
        answers = await self._sample(request, branch, options, ids, text)
        body = formats.of_text(answers, options.logprobs is not None, history.tokenizer)
        if options.stream:
            return events([body, None])
        return as_json(body)

    async def _response(
        self, request: HttpRequest, branch: Branch, options: CallOptions
    ) -> Response:
        kept = branch.agent.responses
        before = options.previous_response_id
        if before is not None and before not in kept:
            raise CallRefused(
                "previous_response_id: there is no such response in this episode", 404
            )
        rule = options.instructions
        first = [{"role": "system", "content": rule}] if rule else []
        sent = [*first, *kept.get(before or "", ()), *formats.of_items(options.input)]
        messages, prompt, box = await self._in_executor(self._encode, branch, options, sent)
        options.n = 1
        (answer,) = await self._sample(request, branch, options, prompt, messages, box)
        body = formats.of_response(answer)
        kept[body["id"]] = [*messages[len(first) :], *formats.plain([answer.message])]
        if options.stream:
            return events(formats.response_events(body))
        return as_json(body)


def as_json(body: Json, status: int = 200) -> Response:
    """Return an answer in ASCII, since a sampled text may have half a surrogate pair."""
    return Response(json.dumps(body), status, media_type="application/json")


def noise(number: Sequence[int]) -> int:
    """Return the position at which the noise of a call begins."""
    state = torch.zeros(1, dtype=torch.int64)
    for part in number:
        state = mix(state + part)
    return int(state)


def events(bodies: Iterable[Json | None]) -> Response:
    """Return server-sent events; None is the last, of the older interfaces."""

    def lines() -> Iterator[str]:
        for body in bodies:
            if body is None:
                yield "data: [DONE]\n\n"
                continue
            kind = f"event: {body['type']}\n" if "type" in body else ""
            yield f"{kind}data: {json.dumps(body)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
