"""Episodes, token by token, on an engine that says what it is told to."""

import asyncio
import math
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch

from rlhf_pg.data import Prompt
from rlhf_pg.episodes import EpisodeRunner
from rlhf_pg.rollout import SamplingParams
from tests.episodes import scripted
from tests.episodes.scripted import ScriptedSession, letters
from tests.rows import episodes_of, played

TOKENIZER = letters()
EOS = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def text(tokens):
    return TOKENIZER.decode(tokens)


class Listed:
    """Answers turn after turn with what it is given; remembers what it heard."""

    def __init__(self, *answers, prompt=None):
        self.answers, self.prompt = list(answers), prompt
        self.heard = []

    def reset(self, example):
        return example["prompt"] if self.prompt is None else self.prompt

    def step(self, completion):
        self.heard.append(completion)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


sayer = partial(scripted.sayer, TOKENIZER)


def play(
    engine,
    *environments,
    prompt="q?",
    n=1,
    max_tokens=40,
    tokenizer=TOKENIZER,
    draws=(7,),
    of=episodes_of,
    **options,
):
    made = iter(environments)
    runner = EpisodeRunner(
        environment_factory=lambda: next(made),
        tokenizer=tokenizer,
        **{"stop_token_ids": [EOS]} | options,
    )
    examples = [{"prompt": prompt, "answer": "a"} for _ in draws]
    tokens = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else [5] for _ in draws]
    params = SamplingParams(max_tokens=max_tokens)
    return of(runner, engine, examples, tokens, list(draws), n, params)


def test_episode_row_has_turns_answers_and_turn_rewards():
    environment = Listed(("up!", 0.5, False), ("no", None, False), ("bye", 2.0, True))
    [episode] = play(sayer("ab<eos>", "c<eos>", "de<eos>"), environment)
    assert text(episode.tokens) == "ab<eos>up!c<eos>node<eos>"
    own = [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert episode.actions == [bool(x) for x in own]
    assert episode.logprobs == [-i / 10 if chosen else 0.0 for i, chosen in enumerate(own)]
    paid = {i: reward for i, reward in enumerate(episode.rewards) if not math.isnan(reward)}
    assert paid == {2: 0.5, 12: 2.0}  # the last tokens of the first and of the third turn
    assert environment.heard == ["ab", "c", "de"]
    assert (episode.turns, episode.truncated, episode.error) == (3, False, None)
    assert (episode.prompt, list(episode.prompt_ids)) == ("q?", ids("q?"))


def test_turn_request_has_full_history_and_own_position():
    engine = sayer("ab<eos>", "c<eos>")
    play(engine, Listed(("up", 0.0, False), ("", 1.0, True)), max_tokens=9)
    first, second = engine.requests
    assert (first.prompt_index, list(first.samples)) == (7, [0])
    assert (first.position, first.max_tokens) == (0, 9)
    assert text(second.tokens) == "q?ab<eos>up"
    assert (second.prompt_index, list(second.samples)) == (7, [0])
    assert (second.position, second.max_tokens) == (5, 4)


def test_turns_keep_sampled_tokens():
    """ "he" and "llo" would be read as "hello" if they were tokenised again."""
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = letters(merges)
    he, llo = (tokenizer.convert_tokens_to_ids(token) for token in ("he", "llo"))
    assert tokenizer("hello")["input_ids"] != [he, llo]
    engine = sayer([he, llo, EOS], [llo, EOS])
    environment = Listed(("hello", 0.0, False), ("", 1.0, True))
    [episode] = play(engine, environment, tokenizer=tokenizer)
    answer = tokenizer("hello")["input_ids"]
    assert episode.tokens == [he, llo, EOS, *answer, llo, EOS]
    assert list(engine.requests[1].tokens) == [*tokenizer("q?")["input_ids"], *episode.tokens[:4]]
    assert environment.heard == ["hello", "llo"]


ASKED = [{"role": "user", "content": "q"}]


def tool(content):
    return {"role": "tool", "content": content}


def test_chat_turns_are_joined_as_in_template():
    answers = [tool("up"), {"role": "user", "content": "go"}]
    environment = Listed((answers, 0.0, False), ([], 1.0, True), prompt=ASKED)
    engine = sayer("ab<eos>", "c<eos>")
    [episode] = play(engine, environment, prompt=ASKED)
    # The <eos> that the template has behind "ab" was sampled already.
    assert text(episode.tokens) == "ab<eos><tool>up<user>go<assistant>c<eos>"
    assert sum(episode.actions) == 5
    assert episode.messages == [
        {"role": "assistant", "content": "ab"},
        *answers,
        {"role": "assistant", "content": "c"},
    ]


def test_space_before_turn_end_does_not_double_eos():
    """As the templates of Llama 2 and the first Mistral have it."""
    tokenizer = letters()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ '<eos>' }}", "{{ ' <eos>' }}")
    environment = Listed(([tool("up")], 0.0, False), ([], 1.0, True), prompt=ASKED)
    [episode] = play(sayer("ab<eos>", "c<eos>"), environment, prompt=ASKED, tokenizer=tokenizer)
    assert text(episode.tokens) == "ab<eos><tool>up<assistant>c<eos>"


def test_eos_is_appended_after_other_stop_token():
    stop = TOKENIZER.convert_tokens_to_ids("z")
    engine = sayer("ab<eos>")
    engine.eos = stop
    engine.script = lambda request, sample: ids("abz" if request.position == 0 else "cz")
    environment = Listed(([tool("up")], 0.0, False), ([], 1.0, True))
    [episode] = play(engine, environment, prompt=ASKED, stop_token_ids=[EOS, stop])
    assert text(episode.tokens) == "abz<eos><tool>up<assistant>cz"
    assert [i for i, own in enumerate(episode.actions) if not own] == list(range(3, 8))


def test_samples_with_own_prompts_are_separate_requests():
    engine = sayer("a<eos>")
    prompts = ("x", "y", "x")
    environments = [Listed(("", i, True), prompt=prompt) for i, prompt in enumerate(prompts)]
    episodes = play(engine, *environments, n=3)
    assert [(text(r.tokens), list(r.samples)) for r in engine.requests] == [
        ("x", [0, 2]),
        ("y", [1]),
    ]
    assert [episode.prompt for episode in episodes] == list(prompts)
    assert [episode.rewards[-1] for episode in episodes] == [0, 1, 2]


def test_environment_gets_own_copy_of_dataset_row():
    seen = []

    class Spoiling(Listed):
        def reset(self, example):
            seen.append(dict(example))
            example.clear()
            return "q?"

    play(sayer("a<eos>"), Spoiling(("", 1.0, True)), Spoiling(("", 1.0, True)), n=2)
    assert seen == [{"prompt": "q?", "answer": "a"}] * 2


@pytest.mark.parametrize(
    ("limit", "row", "truncated"),
    [
        (40, "ab<eos>up!c<eos>", False),
        (7, "ab<eos>up!c", True),  # cut off in its turn
        (6, "ab<eos>", True),  # no room for a turn behind the answer
        (2, "ab", True),
    ],
)
def test_token_limit_counts_turns_and_answers(limit, row, truncated):
    environment = Listed(("up!", None, False), ("", None, True))
    [episode] = play(sayer("ab<eos>", "c<eos>"), environment, max_tokens=limit)
    assert (text(episode.tokens), episode.truncated) == (row, truncated)
    assert episode.actions[-1]


def test_truncated_episode_without_rewards_earns_zero():
    [cut] = play(sayer("ab<eos>"), Listed(("up!", None, False)), max_turns=1)
    assert (cut.turns, cut.truncated, cut.rewards[-1]) == (1, True, 0)
    [paid] = play(sayer("ab<eos>"), Listed(("up!", 0.5, True)), max_tokens=2)
    assert (paid.truncated, paid.rewards[-1]) == (True, 0.5)
    [ended] = play(sayer("ab<eos>"), Listed(("up!", None, True)))
    assert math.isnan(ended.rewards[-1])  # it is for others to judge


class AsyncListed(Listed):
    async def step(self, completion):
        await asyncio.sleep(0.01)
        return super().step(completion)


@pytest.mark.fault(51, "an environment: its own episode ends, the others go on")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OSError("gone"), "OSError: gone"),
        (SystemExit(1), "SystemExit: 1"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
        ("up", "must return Observation"),
        (("up", 1.0, torch.tensor([True, False])), "Boolean value of Tensor"),
    ],
)
@pytest.mark.parametrize("kind", [Listed, AsyncListed])
def test_failing_environment_ends_only_its_episode(kind, answer, error):
    failing = kind(answer, ("", 1.0, True))
    sound = kind(("up", 0.0, False), ("", 1.0, True))
    says = sayer("ab<eos>", "c<eos>")
    rows = play(says, failing, sound, n=2, timeout=20, of=played)
    assert rows[0].actions == [False] * 3
    assert all(map(math.isnan, rows[0].rewards))
    broken, whole = (row.episode for row in rows)
    assert whole.error is None
    assert whole.turns == 2
    assert error in broken.error
    assert text(broken.tokens) == "ab<eos>"
    assert broken.actions == [True] * 3


def test_failed_reset_keeps_dataset_prompt():
    class Broken(Listed):
        def reset(self, example):
            raise ValueError("no beginning\x1b[2J")

    engine = sayer("a<eos>")
    broken, whole = play(engine, Broken(), Listed(("", 1.0, True)), n=2)
    assert broken.error == r"ValueError: no beginning\x1b[2J"  # shown, and not obeyed
    assert (broken.prompt, broken.tokens) == ("q?", [])
    assert whole.error is None
    assert [list(r.samples) for r in engine.requests] == [[1]]


def test_rejected_reset_prompt_keeps_dataset_prompt(monkeypatch):
    """Which is all that the learner then has to forward."""
    add = ScriptedSession.add

    def limited(session, request):
        if len(request.tokens) > 5:
            raise ValueError("is too long")
        add(session, request)

    monkeypatch.setattr(ScriptedSession, "add", limited)
    long, sound = Listed(prompt="abcdefg"), Listed(("", 1.0, True))
    refused, whole = play(sayer("a<eos>"), long, sound, n=2)
    assert refused.error == "ValueError: the episode is too long"
    assert (refused.prompt, refused.prompt_ids, refused.tokens) == ("q?", ids("q?"), [])
    assert whole.error is None


def test_error_of_engine_in_later_turn_is_not_of_the_environment(monkeypatch):
    add = ScriptedSession.add

    def add_first(session, request):
        if request.position:
            raise RuntimeError("the engine is dead")
        add(session, request)

    monkeypatch.setattr(ScriptedSession, "add", add_first)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        play(sayer("a<eos>"), Listed(("up", 0.0, False)))


def test_group_that_has_ended_does_not_wait_for_the_others():
    """So that its rewards may begin."""
    goes_on = threading.Event()

    class Slow(Listed):
        def step(self, completion):
            assert goes_on.wait(20)
            return super().step(completion)

    made = iter([Slow(("", 1.0, True)), Listed(("", 1.0, True))])
    runner = EpisodeRunner(
        environment_factory=lambda: next(made), tokenizer=TOKENIZER, stop_token_ids=[EOS]
    )
    prompts = [
        Prompt(index=i, dataset_row=i, example={"prompt": "q?"}, ids=ids("q?")) for i in range(2)
    ]
    groups = runner.play(sayer("a<eos>", "b<eos>"), prompts, 1, SamplingParams(max_tokens=4), 0)
    assert next(groups)[0].group == 1
    goes_on.set()
    assert [row.group for rows in groups for row in rows] == [0]


def test_failing_factory_is_episode_error():
    runner = EpisodeRunner(
        environment_factory=lambda: 1 / 0, tokenizer=TOKENIZER, stop_token_ids=[EOS]
    )
    params = SamplingParams(max_tokens=4)
    examples = [{"prompt": "q?"}]
    episodes = episodes_of(runner, sayer("a<eos>"), examples, [ids("q?")], [0], 2, params)
    assert [episode.error for episode in episodes] == ["ZeroDivisionError: division by zero"] * 2


class Waiting(Listed):
    """Answers when it is let go."""

    def __init__(self, *answers):
        super().__init__(*answers)
        self.go = threading.Event()

    def step(self, completion):
        assert self.go.wait(30)
        return super().step(completion)


class AsyncWaiting(Waiting):
    async def reset(self, example):
        return example["prompt"]

    async def step(self, completion):
        while not self.go.is_set():
            await asyncio.sleep(0.001)
        return Listed.step(self, completion)


@pytest.mark.parametrize("kind", [Waiting, AsyncWaiting])
def test_episode_continues_while_another_waits(kind):
    """The second one lets the first go, and only when it has come to its own end."""
    slow = kind(("", 1.0, True))

    class Freeing(Listed):
        def step(self, completion):
            answer = super().step(completion)
            if answer[2]:
                slow.go.set()
            return answer

    quick = Freeing(("up", 0.0, False), ("up", 0.0, False), ("", 1.0, True))
    episodes = play(sayer("a<eos>", "b<eos>", "c<eos>"), slow, quick, n=2)
    assert [episode.turns for episode in episodes] == [1, 3]
    assert [episode.error for episode in episodes] == [None, None]


class BlockingLoop(Waiting):
    async def step(self, completion):
        return Waiting.step(self, completion)


class NotCancelled(AsyncWaiting):
    async def step(self, completion):
        while not self.go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)


@pytest.mark.fault(55, "its episode ends after environment_timeout, the others go on")
@pytest.mark.parametrize("kind", [Waiting, AsyncWaiting, BlockingLoop, NotCancelled])
def test_late_answer_is_episode_error(kind):
    never, sound = kind(("", 1.0, True)), Listed(("", 1.0, True))
    broken, whole = play(sayer("a<eos>"), never, sound, n=2, timeout=0.2)
    assert broken.error == "TimeoutError: no answer within 0.2 s"
    assert whole.error is None
    never.go.set()


def test_results_do_not_depend_on_finishing_order():
    def environments():
        return [Listed((f"{c}", i, False), ("", 1.0, True)) for i, c in enumerate("xyz")]

    one, other = (
        play(sayer("a<eos>", "b<eos>", latest_first=latest), *environments(), n=3)
        for latest in (False, True)
    )
    for a, b in zip(one, other, strict=True):
        assert (a.tokens, a.logprobs, a.actions) == (b.tokens, b.logprobs, b.actions)
        assert a.rewards[1] == b.rewards[1]
    assert [text(episode.tokens) for episode in one] == [f"a<eos>{c}b<eos>" for c in "xyz"]


def test_calls_of_tools_may_have_special_tokens():
    """What parses calls gets them with special tokens, but without the one that ends the turn."""
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    engine = scripted.sayer(tokenizer, "<tool_call>a<eos>")
    seen = []

    class Sees(Listed):
        def step(self, completion):
            seen.append(completion)
            return super().step(completion)

    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ((), (schema,)):
        play(engine, Sees(([], 1.0, True)), prompt=ASKED, tokenizer=tokenizer, tools=tools)
    assert seen == ["a", "<tool_call>a"]
