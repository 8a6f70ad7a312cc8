"""Programs that ask the policy through OpenAI's client, on an engine that says what it is told."""

import asyncio
import json
import math
import random
import sys
import time
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rlhf_pg.agents.endpoint import CallRefused, Endpoint, noise
from rlhf_pg.agents.runner import AgentRunner, program_of
from rlhf_pg.rollout import Request, SamplingParams
from tests.agents.test_history import tokenizer_with
from tests.episodes.scripted import ScriptedEngine
from tests.rows import episodes_of, played

TOKENIZER = tokenizer_with("qwen2_5")
EOS = TOKENIZER.eos_token_id
ASK = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "press", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "press", "arguments": {"times": 3}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    return [i for letter in text for i in TOKENIZER(letter)["input_ids"]]


def says(text: str, whole: bool = True) -> Any:
    return lambda request, sample: [*ids_of(text), *[EOS] * whole]


def play(
    program: Any,
    script: Any = None,
    n: int = 1,
    rows: int = 1,
    of: Any = episodes_of,
    **options: Any,
) -> list[Any]:
    limits = {"max_tokens": options.pop("max_tokens", 400)}
    runner = AgentRunner(
        program=program,
        tokenizer=TOKENIZER,
        stop_token_ids=[EOS],
        **{"timeout": 20.0, "call_timeout": 10.0} | options,
    )
    engine = ScriptedEngine(script or says("ok"), EOS)
    examples = [{"prompt": "x", "number": i, "chat": list(ASK)} for i in range(rows)]
    params = SamplingParams(**limits)
    return of(runner, engine, examples, [[1]] * rows, range(rows), n, params)


@cache
def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def client_of(endpoint: Endpoint) -> openai.OpenAI:
    return client(endpoint.base_url, endpoint.api_key)


def ask(endpoint: Endpoint, messages: Any = ASK, **options: Any) -> Any:
    create = client_of(endpoint).chat.completions.create
    return create(model=endpoint.model, messages=messages, **options)


def test_turns_of_a_chat_are_one_row() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        first = ask(endpoint, logprobs=True)
        assert first.choices[0].message.content == "ok"
        assert first.choices[0].finish_reason == "stop"
        assert [x.token for x in first.choices[0].logprobs.content[:2]] == ["o", "k"]
        assert first.usage.completion_tokens == 3
        said = {"role": "assistant", "content": "ok"}
        ask(endpoint, [*ASK, said, *ASK])
        return 2.0

    [episode] = play(program)
    prompt = TOKENIZER.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(episode.prompt_ids) == prompt
    words = [*ids_of("ok"), EOS]
    assert episode.tokens[:3] == episode.tokens[-3:] == words
    assert episode.actions == [True] * 3 + [False] * (len(episode.tokens) - 6) + [True] * 3
    assert episode.offsets == [1] * len(episode.tokens)
    assert episode.rewards[-1] == 2.0
    assert all(map(math.isnan, episode.rewards[:-1]))
    assert episode.messages[-1] == {"role": "assistant", "content": "ok"}
    assert (episode.turns, episode.truncated, episode.error) == (2, False, None)


def test_a_shorter_history_is_a_branch() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> list[float]:
        ask(endpoint)
        ask(endpoint, [*ASK, {"role": "assistant", "content": "ok"}, *ASK])
        ask(endpoint, [{"role": "user", "content": "b"}])
        return [1.0, 2.0, 3.0]

    [episode] = play(program)
    start = len(episode.prompt_ids)
    other = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "b"}], tokenize=False, add_generation_prompt=True
    )
    ids = TOKENIZER(other)["input_ids"]
    same = next(
        i for i, pair in enumerate(zip(ids, episode.prompt_ids, strict=False)) if pair[0] != pair[1]
    )
    [place] = [i for i, back in enumerate(episode.offsets) if back != 1]
    assert start + place - episode.offsets[place] == same - 1
    assert episode.tokens[place:-3] == ids[same:]
    paid = [i for i, reward in enumerate(episode.rewards) if not math.isnan(reward)]
    assert [episode.rewards[i] for i in paid] == [1.0, 2.0, 3.0]
    assert paid == [
        i for i, token in enumerate(episode.tokens) if token == EOS and episode.actions[i]
    ]


def test_tools_stream_and_responses() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        client = client_of(endpoint)
        first = ask(endpoint, tools=[TOOL])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("press", {"times": 3})
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        chat = [*ASK, message.model_dump(exclude_none=True), result]
        usage = {"include_usage": True}
        chunks = list(ask(endpoint, chat, tools=[TOOL], stream=True, stream_options=usage))
        [again] = [x for c in chunks for d in c.choices[:1] for x in d.delta.tool_calls or ()]
        assert again.function.name == "press"
        assert chunks[-1].usage.total_tokens > 0
        create = client.responses.create
        tool = {"type": "function", **TOOL["function"], "strict": False}
        reply = create(model="policy", input="a", instructions="b", tools=[tool])
        [item] = [item for item in reply.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        options = {"model": "policy", "previous_response_id": reply.id, "tools": [tool]}
        options["instructions"] = "b"
        with client.responses.stream(input=[output], **options) as stream:
            final = stream.get_final_response()
        assert final.output[0].name == "press"

    [episode] = play(program, says(CALL), max_tokens=4000)
    assert episode.error is None
    assert (episode.turns, episode.encoded_again) == (4, 0)
    # Of both interfaces, the second call continues the first.
    assert sum(back != 1 for back in episode.offsets) == 1


def test_edited_call_of_a_tool_is_the_programs() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        message = ask(endpoint, tools=[TOOL]).choices[0].message.model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"times": 9}'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        ask(endpoint, [*ASK, message, result], tools=[TOOL])

    [episode] = play(program, says(CALL), max_tokens=4000)
    own = [token for token, acts in zip(episode.tokens, episode.actions, strict=True) if not acts]
    assert TOKENIZER.decode(own).startswith("9}}")  # the rest is as it was said


def test_streams_have_the_words_once() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        chunks = list(ask(endpoint, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ok"
        with client_of(endpoint).responses.stream(model="policy", input="a") as stream:
            assert [x.snapshot for x in stream if x.type == "response.output_text.delta"] == ["ok"]

    assert play(program)[0].error is None


def test_texts_choices_and_stops() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        create = client_of(endpoint).completions.create
        first = create(model="policy", prompt="a", n=2, stop=["k"], max_tokens=2, logprobs=1)
        assert [choice.text for choice in first.choices] == ["o", "o"]
        assert first.choices[0].logprobs.tokens == ["o", "k"]
        # What is behind the stop string is not in the text that it continues.
        second = create(model="policy", prompt="ao", stream=True)
        assert [chunk.choices[0].text for chunk in second] == ["ok"]
        assert create(model="policy", prompt=[5, 6]).choices[0].text == "ok"

    [episode] = play(program)
    assert episode.error is None
    assert (episode.turns, episode.prompt) == (4, "a")
    letters = [TOKENIZER(text)["input_ids"][0] for text in "ok"]
    assert episode.tokens[:2] == episode.tokens[2:4] == letters
    # The choices, and from the first one's "o" the second call's answer.
    assert episode.tokens[4:6] == letters
    assert episode.offsets[:5] == [1, 1, 3, 1, 4]


def test_prompt_of_token_ids_is_a_text_for_rewards() -> None:
    def program(row: dict[str, Any], endpoint: Endpoint) -> None:
        client_of(endpoint).completions.create(model="policy", prompt=ids_of("a"))

    [episode] = play(program)
    assert episode.prompt == "a"


def test_samples_of_a_prompt_do_not_share_its_row() -> None:
    lengths = []

    def program(row: dict[str, Any], endpoint: Endpoint) -> None:
        row["chat"].append({"role": "user", "content": "b"})
        lengths.append(len(row["chat"]))
        ask(endpoint, row["chat"])

    assert [episode.error for episode in play(program, n=3)] == [None] * 3
    assert lengths == [2, 2, 2]


SYSTEM = [{"role": "system", "content": "s"}]


class Talk:
    """Three turns of one conversation, by one interface or another."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.client, self.endpoint, self.chat = client_of(endpoint), endpoint, list(SYSTEM)

    def say(self, way: str, question: str) -> None:
        interface, *traits = way.split()
        self.chat.append({"role": "user", "content": question})
        if "retried" in traits:  # whoever asked first has gone
            with pytest.raises(openai.APITimeoutError):
                self.send(interface, traits, timeout=0.02)
        if "refused" in traits:
            with pytest.raises(openai.BadRequestError):
                self.send("chat", (), n=0)
        self.chat.append({"role": "assistant", "content": self.send(interface, traits)})

    def send(self, interface: str, traits: Any, **options: Any) -> str:
        chat, streams = list(self.chat), "streamed" in traits
        if "parts" in traits:
            chat = [
                {**x, "content": [{"type": "text", "text": part} for part in x["content"]]}
                for x in chat
            ]
        if interface == "chat":
            more = {"name": "x"} if "named" in traits else {}
            chat = [{**message, **more} for message in chat]
            options |= {"temperature": 0.1, "seed": 5} if "seeded" in traits else {}
            if not streams:
                return ask(self.endpoint, chat, **options).choices[0].message.content
            chunks = ask(self.endpoint, chat, stream=True, **options)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        if interface == "text":
            create = self.client.completions.create
            text = TOKENIZER.apply_chat_template(
                self.chat, tokenize=False, add_generation_prompt=True
            )
            return create(model="policy", prompt=text, **options).choices[0].text
        create = self.client.responses.create
        if "linked" in traits:
            before = getattr(self, "id", None)
            chat, options = chat[-1:], {"previous_response_id": before, **options}
        else:
            chat = chat[1:]
        reply = create(model="policy", input=chat, instructions="s", **options)
        self.id = reply.id
        return reply.output_text


def test_twenty_ways_of_asking_give_one_row() -> None:
    """Interfaces may change from turn to turn; what was refused or given up leaves no trace."""
    ways = ["chat", "chat streamed", "chat parts", "chat named", "chat seeded", "chat refused"]
    ways += ["chat retried", "chat streamed parts refused", "text", "text refused"]
    ways += ["responses", "responses parts", "responses linked", "responses linked refused"]
    mixed = [("chat", "text", "responses"), ("text", "chat streamed", "chat parts")]
    mixed += [("responses", "chat retried", "text"), ("chat", "responses parts", "chat named")]
    mixed += [("text", "responses", "chat refused"), ("chat seeded", "chat parts", "text refused")]
    plans = [*((way,) * 3 for way in ways), *mixed]

    def program(row: dict[str, Any], endpoint: Endpoint) -> None:
        talk = Talk(endpoint)
        for way, question in zip(plans[row["number"]], "abc", strict=True):
            talk.say(way, question)

    retried = {i for i, plan in enumerate(plans) if "chat retried" in plan}

    def script(request: Request, sample: int) -> list[int]:
        if (first := (request.prompt_index, len(request.tokens))) not in seen:
            seen.add(first)
            time.sleep(0.3 * (request.prompt_index in retried))
        return [*ids_of(f"Yes, {len(request.tokens)}."), EOS]

    seen: set[tuple[int, int]] = set()
    first, *others = play(program, script, rows=20, max_tokens=2000)
    assert first.error is None
    assert first.turns == 3
    assert set(first.offsets) == {1}
    for other in others:
        assert other.error is None
        assert (other.prompt_ids, other.tokens) == (first.prompt_ids, first.tokens)
        assert (other.actions, other.offsets) == (first.actions, first.offsets)
        assert (other.turns, other.encoded_again) == (3, 0)


def test_number_of_a_call_seeds_its_noise() -> None:
    """By the order of calls and forks, not by arrival."""
    seen: dict[str, list[int]] = {}

    def script(request: Request, sample: int) -> list[int]:
        text = TOKENIZER.decode(request.tokens, skip_special_tokens=True)
        seen.setdefault(text, []).append(request.position)
        return [*ids_of("ok"), EOS]

    async def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        async def part(name: str, own: Endpoint) -> None:
            client = openai.AsyncOpenAI(base_url=own.base_url, api_key=own.api_key)
            await asyncio.sleep(random.SystemRandom().random() / 10)
            chat: Any = [{"role": "user", "content": name}]
            await client.chat.completions.create(model="policy", messages=chat)

        await part("a", endpoint)
        await asyncio.gather(*(part(name, endpoint.fork()) for name in "bcd"))
        await part("e", endpoint)

    [episode] = play(program, script)
    assert not episode.overlaps
    numbers = [(0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0)]
    found = [seen[text] for text in sorted(seen)]
    assert found == [[noise(number)] for number in numbers]
    marks = [TOKENIZER(name)["input_ids"][0] for name in "bcde"]
    own = [token for token, acts in zip(episode.tokens, episode.actions, strict=True) if not acts]
    assert [token for token in own if token in marks] == marks


def test_luck_of_a_program_can_be_repeated() -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        seeds.append({endpoint.seed, endpoint.fork().seed})
        ask(endpoint)

    runs = []
    for _ in range(2):
        seeds: list[set[int]] = []
        play(program, n=2, rows=2)
        runs.append(set().union(*seeds))
    assert runs[0] == runs[1]
    assert len(runs[0]) == 8


def test_calls_side_by_side_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        create = client.chat.completions.create
        await asyncio.gather(*(create(model="policy", messages=ASK) for _ in range(3)))

    def slow(request: Request, sample: int) -> list[int]:
        time.sleep(0.3)
        return [EOS]

    [episode] = play(program, slow)
    assert episode.overlaps
    assert "fork" in caplog.text

    async def forks(example: dict[str, Any], endpoint: Endpoint) -> None:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        call = asyncio.create_task(client.completions.create(model="policy", prompt="a"))
        await asyncio.sleep(0.1)
        endpoint.fork()
        await call

    assert play(forks, slow)[0].overlaps


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"max_tokens": 40}, "context_length_exceeded"),
        ({"longest_prompt": 300, "max_tokens": 1000}, "context_length_exceeded"),
    ],
)
def test_limits_end_an_episode(options: dict[str, Any], limit: str) -> None:
    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        chat = list(ASK)

        def go_on() -> None:
            while True:
                said = ask(endpoint, chat).choices[0].message.content
                chat.extend([{"role": "assistant", "content": said}, *ASK])

        with pytest.raises(openai.APIStatusError) as refused:
            go_on()
        assert (refused.value.status_code, refused.value.code) == (400, limit)
        # verifiers takes other words for a fault of the server.
        assert ("context length" in str(refused.value)) == (limit == "context_length_exceeded")
        return 1.0

    [episode] = play(program, **options)
    assert episode.error is None
    assert episode.truncated
    assert episode.rewards[-1] == 1.0


@pytest.mark.parametrize("late", [0, 1])
def test_limits_do_not_depend_on_the_clock(late: int) -> None:
    """What runs beside a part of a program takes nothing from it, and lines keep their order."""

    async def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        async def part(place: int, own: Endpoint) -> None:
            client = openai.AsyncOpenAI(base_url=own.base_url, api_key=own.api_key)
            await asyncio.sleep(0.2 * (place == late))
            inner = own.fork()
            client = client.with_options(api_key=inner.api_key)
            chat: Any = [{"role": "user", "content": str(place)}]
            await client.chat.completions.create(model="policy", messages=chat)

        await asyncio.gather(*(part(i, endpoint.fork()) for i in range(2)))

    [episode] = play(program, says("long" * 20, whole=False), max_tokens=60)
    assert episode.truncated
    assert not episode.overlaps
    assert sum(episode.actions) == 120
    lines = [x for x, acts in zip(episode.branches, episode.actions, strict=True) if acts]
    assert lines == [2] * 60 + [4] * 60
    prompts = TOKENIZER.decode([*episode.prompt_ids, *episode.tokens])
    assert prompts.index("0<|im_end|>") < prompts.index("1<|im_end|>")


def test_nothing_goes_on_after_its_episode() -> None:
    left: list[Any] = []

    def ask_late(endpoint: Endpoint) -> None:
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(endpoint)
        left.append(refused.value.status_code)

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        ask(endpoint)
        left.append(endpoint)
        threads.append(Thread(target=ask_late, args=(endpoint,)))
        threads[0].start()
        time.sleep(0.3)
        return 1.0

    def slow(request: Request, sample: int) -> list[int]:
        time.sleep(len(left))  # the call that outlives its episode
        return [EOS]

    threads: list[Thread] = []
    [episode] = play(program, slow)
    assert (episode.turns, episode.error) == (1, None)
    threads[0].join(5)
    assert left[1:] == [401]
    with pytest.raises(CallRefused):
        left[0].fork()


def test_engine_that_fails_ends_all_programs() -> None:
    ends: list[Any] = []

    async def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        try:
            client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
            await client.completions.create(model="policy", prompt="a")
        except BaseException as error:
            ends.append(error)
            raise

    def fails(request: Request, sample: int) -> list[int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(program, fails, rows=3)
    deadline = time.monotonic() + 5
    while len(ends) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ends) == 3


def test_given_up_call_does_not_count() -> None:
    seen: list[int] = []

    def program(example: dict[str, Any], endpoint: Endpoint) -> None:
        with pytest.raises(openai.APITimeoutError):
            ask(endpoint, timeout=0.2)
        time.sleep(1.0)
        ask(endpoint)

    def slow(request: Request, sample: int) -> list[int]:
        seen.append(request.position)
        time.sleep(0.6 * (len(seen) == 1))
        return [EOS]

    [episode] = play(program, slow, max_turns=1)
    assert (episode.turns, episode.error) == (1, None)
    assert seen == [noise((0, 0))] * 2


def test_an_episode_fails_alone() -> None:
    late: list[Any] = []

    def program(example: dict[str, Any], endpoint: Endpoint) -> Any:
        kind = example["number"]
        if kind == 1:
            return 1.0  # without a call
        ask(endpoint)
        if kind == 2:
            raise SystemExit("bye")
        if kind == 3:
            return [1.0, 2.0]
        if kind == 4:
            late.append(endpoint)
            time.sleep(3)
        return 1.0 if kind == 0 else "nothing"

    made = play(program, rows=6, timeout=2.0, of=played)
    good, *failed = (row.episode for row in made)
    assert good.error is None
    words = ["asked nothing", "bye", "2 rewards for 1", "2 s", "nothing"]
    for episode, word in zip(failed, words, strict=True):
        assert word in episode.error
    assert [row.is_judged for row in made] == [True, *[False] * 5]
    with pytest.raises(openai.AuthenticationError):
        ask(late[0])


def test_a_command_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import json, os, sys, openai\n"
        "openai.OpenAI().responses.create(model=os.environ['OPENAI_MODEL'], input='a')\n"
        "print('paid')\nprint(json.load(sys.stdin)['number'] + 0.5)"
    )
    asks = f"{sys.executable} {tmp_path}/asks.py"
    first, second = play(program_of(asks), rows=2)
    assert (first.rewards[-1], second.rewards[-1]) == (0.5, 1.5)
    [failed] = play(program_of("echo no >&2; exit 3"))
    assert "status 3: no" in failed.error
    [unpaid] = play(lambda row, endpoint: bool(ask(endpoint)) or None, pays=True)
    assert unpaid.error is None
    [unpaid] = play(lambda row, endpoint: ask(endpoint) and None, pays=True)
    assert "no reward" in unpaid.error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=9,
)
NAMES = ("messages", "prompt", "input", "n", "stop", "tools", "stream", "max_tokens", "role")
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "type"]), JSON)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON | st.lists(MESSAGE, max_size=3))


def test_nothing_that_arrives_ends_the_run() -> None:
    statuses: list[int] = []

    def program(example: dict[str, Any], endpoint: Endpoint) -> float:
        paths = st.sampled_from(["chat/completions", "completions", "responses", "models", "x"])
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        with httpx2.Client(base_url=endpoint.base_url, headers=headers, timeout=10) as client:

            @settings(
                max_examples=100,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(paths, BODIES.map(lambda x: json.dumps(x).encode()) | st.binary())
            def send(path: str, body: bytes) -> None:
                answer = client.post(f"/{path}", content=body)
                statuses.append(answer.status_code)
                assert answer.status_code < 500
                if answer.status_code in (400, 401, 413):
                    assert answer.json()["error"]["message"]

            send()
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
            body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
            assert client.post("/chat/completions", json=body).status_code == 400
            assert client.post("/completions", content=b" " * (2**23 + 1)).status_code == 413
            client.headers["Authorization"] = "Bearer none"
            assert client.post("/completions", json={"prompt": "a"}).status_code == 401
            ask(endpoint)
        return 1.0

    [episode] = play(program, timeout=120.0, max_tokens=10**9)
    assert episode.error is None
    assert 400 in statuses
