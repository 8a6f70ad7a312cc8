"""Every kind of user code raises, calls `sys.exit` or returns nonsense: the error names it."""

import itertools
import sys

import pytest
import torch
from datasets import Dataset

from rlhf_pg import Callback
from rlhf_pg.data.prompts import load_prompts
from rlhf_pg.episodes import EpisodeRunner, Toolbox, ToolEnvironment
from rlhf_pg.rollout import SamplingParams
from tests.episodes.scripted import letters
from tests.episodes.test_episodes import EOS, Listed, ids, sayer
from tests.rewards.calling import Rewards
from tests.rows import episodes_of
from tests.trainers.conftest import digits, make  # noqa: F401

TOKENIZER = letters()
CHAT = [{"role": "user", "content": "q"}]


def leave():
    sys.exit(0)


def fail():
    raise KeyError("lost")


RAISING = {leave: "SystemExit: 0", fail: "KeyError: 'lost'"}
raising = pytest.mark.parametrize("misbehave", RAISING, ids=lambda f: f.__name__)


def of_rewards(wrap):
    def run(misbehave):
        with pytest.raises(ValueError, match=r"^reward function said raised") as error:
            Rewards(wrap(misbehave))(["p"], ["c"], [[4]], {})
        return str(error.value)

    return run


def plain(misbehave):
    def said():
        """A reward, or a tool."""
        misbehave()

    return said


def coroutine(misbehave):
    async def said():
        """A reward, or a tool."""
        misbehave()

    return said


def play(factory, engine=None, prompt="q?", **options):
    runner = EpisodeRunner(
        environment_factory=factory,
        tokenizer=TOKENIZER,
        stop_token_ids=[EOS],
        timeout=20,
        **options,
    )
    engine = engine or sayer("a<eos>", "b<eos>")
    params = SamplingParams(max_tokens=9)
    [episode] = episodes_of(runner, engine, [{"prompt": prompt}], [ids("q?")], [0], 1, params)
    return episode


def of_episodes(make_factory):
    return lambda misbehave: play(make_factory(misbehave)).error


def factory(misbehave):
    return misbehave


def method(name, wrap):
    def environment(misbehave):
        said = wrap(misbehave)
        return type("Environment", (Listed,), {name: lambda *_: said()})

    return environment


def of_tools(wrap):
    def run(misbehave):
        box = Toolbox.of([wrap(misbehave)], TOKENIZER, 20)
        call = '<tool_call>{"name": "said", "arguments": {}}</tool_call>'
        environment = ToolEnvironment(box)
        environment.reset({"prompt": CHAT})
        [message] = environment.step(call).messages
        return message["content"]

    return run


def transform(misbehave):
    def transformed(batch):
        misbehave()

    data = Dataset.from_list([{"prompt": "a"}]).with_transform(transformed)
    with pytest.raises(ValueError, match="transform cannot be applied") as error:
        load_prompts(data, TOKENIZER)
    return str(error.value)


KINDS = {
    "plain reward": of_rewards(plain),
    "async reward": of_rewards(coroutine),
    "environment_factory": of_episodes(factory),
    "reset": of_episodes(method("reset", plain)),
    "step": of_episodes(method("step", plain)),
    "async step": of_episodes(method("step", coroutine)),
    "tool": of_tools(plain),
    "async tool": of_tools(coroutine),
    "transform": transform,
}


@pytest.mark.fault(
    51, "an error names who raised what: it ends the run, or of environments and tools the episode"
)
@raising
@pytest.mark.parametrize("kind", KINDS)
def test_user_code_error_names_cause(kind, misbehave):
    assert RAISING[misbehave] in KINDS[kind](misbehave)


@pytest.mark.fault(51, "a callback: an error names it, and the process is not ended")
@pytest.mark.parametrize("moment", ["on_step", "on_end"])
def test_callback_error_does_not_exit_process(make, moment):  # noqa: F811
    class Leaving(Callback):
        pass

    setattr(Leaving, moment, lambda *_: leave())
    trainer = make(callbacks=[Leaving()], max_steps=1, save_steps=1)
    with pytest.raises(RuntimeError, match=f"^{moment} of the callback Leaving .*SystemExit: 0"):
        trainer.train()


ODD = {
    "an object": object(),
    "bytes": b"\xff",
    "a lone surrogate": "\ud800",
    "an array": torch.ones(2, 2),
}


@pytest.mark.fault(54, "of a reward: an error names the function")
@pytest.mark.parametrize("odd", ODD)
def test_odd_score_error_names_reward_function(odd):
    for result in (ODD[odd], [ODD[odd]]):
        with pytest.raises(ValueError, match=r"^reward function <lambda> "):
            Rewards(lambda result=result, **_: result)(["p"], ["c"], [[4]], {})


@pytest.mark.fault(54, "of an environment: at most its episode ends")
@pytest.mark.parametrize("where", ["answer", "reward", "done", "messages", "content", "part"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_environment_answer_ends_at_most_one_episode(odd, where):
    value = ODD[odd]
    if where == "part":
        value = [{"type": "text", "text": value}, {"type": "image"}]
    messages = {"messages": value}.get(where, [{"role": "tool", "content": value}])
    answer = {
        "answer": value,
        "reward": ([], value, False),
        "done": ([], 0.0, value),
    }.get(where, (messages, 0.0, False))
    episode = play(lambda: Listed(answer, ([], 0.0, True), prompt=CHAT), prompt=CHAT)
    assert episode.error is None or len(episode.error) < 2000
    play(lambda: Listed(prompt=value), prompt=CHAT)
    caught = Listed(([{"role": "tool", "content": "up"}], 0.0, False), answer, prompt=CHAT)
    play(lambda: caught, prompt=CHAT)


@pytest.mark.fault(56, "the episode is truncated")
def test_huge_text_truncates_the_episode():
    huge = "a" * 100_000
    messages = [{"role": "tool", "content": huge}]
    episode = play(lambda: Listed((messages, 1.0, False), prompt=CHAT), prompt=CHAT)
    assert (episode.error, episode.truncated) == (None, True)
    episode = play(lambda: Listed((huge, 1.0, False)))
    assert (episode.error, episode.truncated) == (None, True)
    episode = play(lambda: Listed(prompt=huge), longest_prompt=20)
    assert "too long: 100000 tokens" in episode.error
    assert episode.prompt == "q?"


def test_random_dataset_transform_is_applied_once(make):  # noqa: F811
    drawn = iter(range(1000))
    data = Dataset.from_list([{"prompt": ""}] * 3).with_transform(
        lambda batch: {"prompt": [f"{next(drawn) % 100:02d}+1=" for _ in batch["prompt"]]}
    )
    trainer = make(train_dataset=data)
    rows = trainer.sampler.roll_out(range(2))
    for prompt, tokens, mask in zip(rows.prompts, rows.prompt_ids, rows.prompt_mask, strict=True):
        assert trainer.processing_class.decode(tokens[mask.bool()]) == prompt


def test_refused_environment_prompt_is_not_forwarded(make):  # noqa: F811
    begun = itertools.count()

    class Long(Listed):
        def reset(self, example):
            return "1+1=" * 9 if next(begun) % 2 else example["prompt"]

        def step(self, completion):
            return "", 1.0, True

    trainer = make(
        reward_funcs=(), environment_factory=Long, micro_batch_tokens=32, num_generations=2
    )
    samples = trainer.sampler.roll_out(range(4))
    errors = [episode.error for episode in samples.episodes]
    assert [error is None for error in errors].count(False) == 4
    assert all("too long: 36 tokens, for at most 26" in error for error in errors if error)
    assert samples.prompt_ids.shape[1] <= trainer.train_prompts.longest
