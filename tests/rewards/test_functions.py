"""Reward functions: how they are called, and what they may return."""

import asyncio
import functools
import math
import os
import signal
import threading

import numpy as np
import pytest
import torch
from transformers import TrainerState

from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.functions import RewardInputs
from tests.rewards.calling import Rewards

PROMPTS = ["p", "p", "q"]
COMPLETIONS = ["a", "bb", "ccc"]
IDS = [[4], [5, 5], [6, 6, 6]]
COLUMNS = {"answer": ["a", "a", "c"], "tags": [["x"], ["x"], ["y"]]}


def call(*functions, columns=COLUMNS):
    """(3,K) the totals."""
    return sum_step_scores(per_token(*functions, columns=columns))


def per_token(*functions, columns=COLUMNS, action_mask=None):
    """(3,3,K)"""
    return Rewards(list(functions))(PROMPTS, COMPLETIONS, IDS, columns, action_mask)


def says(scores, name="said"):
    """A reward function that returns what it is told."""

    def function(**_):
        return scores

    function.__name__ = name
    return function


def length(completions, **_):
    return [float(len(text)) for text in completions]


async def slow_length(completions, **_):
    await asyncio.sleep(0.001)
    return [float(len(text)) for text in completions]


class Length:
    def __call__(self, completions, **_):
        return length(completions)


class SlowLength:
    async def __call__(self, completions, **_):
        return await slow_length(completions)


KINDS = [length, slow_length, Length(), SlowLength(), lambda **kw: slow_length(**kw)]


@pytest.mark.parametrize("function", KINDS, ids=lambda f: type(f).__name__)
def test_reward_kinds_are_called_alike(function):
    async def notebook():  # with an event loop that runs already
        return call(function)

    for scores in (call(function), asyncio.run(notebook())):
        assert scores.tolist() == [[1], [2], [3]]
        assert scores.dtype == torch.float64


def test_loop_bound_object_works_at_every_step():
    """A lock that somebody waits for belongs to the loop of the first who did."""
    one_at_a_time = asyncio.Semaphore(1)

    async def ask(text):
        async with one_at_a_time:
            await asyncio.sleep(0.001)
            return float(len(text))

    async def asking(completions, **_):
        return await asyncio.gather(*map(ask, completions))

    for _ in range(2):
        assert call(asking, lambda **kw: asking(**kw)).tolist() == [[1, 1], [2, 2], [3, 3]]


def test_interrupt_cancels_hanging_async_reward():
    cleaned = threading.Event()

    async def hangs(**_):
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.set()

    threads = threading.active_count()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            Rewards(hangs)(PROMPTS, COMPLETIONS, IDS, {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned.wait(30)
    assert threading.active_count() <= threads + 1  # that of the loop


def test_trainer_arguments_go_only_to_functions_asking_for_them():
    state = TrainerState(global_step=3, max_steps=9, epoch=0.5)
    seen = []

    async def asks(completions, ended, step, trainer_state, **_):
        seen.append((ended, step, trainer_state.global_step, trainer_state.max_steps))
        trainer_state.global_step = 99
        return [0.0] * len(completions)

    def others(prompts, completions, completion_ids, answer, tags):
        return [0.0] * 3

    def catch_all(**given):
        of_trl = {"trainer_state", "log_extra", "log_metric"}
        assert given.keys() == {"prompts", "completions", "completion_ids", *COLUMNS, *of_trl}
        return [0.0] * 3

    rewards = Rewards([asks, others, catch_all])
    rewards(PROMPTS, COMPLETIONS, IDS, COLUMNS, ended=[True, False, True], state=state)
    assert seen == [([True, False, True], 3, 3, 9)]
    assert state.global_step == 3


def test_environments_are_handed_over_uncopied():
    environments = [object() for _ in PROMPTS]
    seen = []

    def named(environments):
        seen.extend(environments)
        return [0.0] * 3

    async def catch_all(**given):
        seen.extend(given["environments"])
        return [0.0] * 3

    Rewards([named, catch_all])(PROMPTS, COMPLETIONS, IDS, {}, environments=environments)
    assert all(given is own for given, own in zip(seen, environments * 2, strict=True))


def test_column_overrides_trainer_argument_of_same_name():
    said = Rewards(
        [
            lambda step, **_: step,
            lambda ended, **_: [int(e == "no") for e in ended],
            lambda log_extra: log_extra,
        ]
    )
    columns = {"step": [5, 6, 7], "ended": ["yes", "no", "no"], "log_extra": [1, 2, 3]}
    known = {"ended": [True] * 3, "state": TrainerState(global_step=3)}
    scores = sum_step_scores(said(PROMPTS, COMPLETIONS, IDS, columns, **known))
    assert scores.tolist() == [[5, 0, 1], [6, 1, 2], [7, 1, 3]]


def test_no_completions_call_no_function():
    def never(**_):
        raise AssertionError

    assert Rewards([never, never])([], [], [], {"answer": []}).shape == (0, 1, 2)


@pytest.mark.fault(28, "every function has copies")
def test_input_mutation_is_invisible_to_other_functions():
    def vandal(prompts, completions, completion_ids, answer, tags):
        prompts[0][0]["content"] = completions[0] = answer[0] = "gone"
        completion_ids[0].append(9)
        tags[0].clear()
        del completions[1:]
        return [0.0]

    inputs = {"answer": ["a"], "tags": [["x"]]}
    prompts, completions, ids = [[{"role": "user", "content": "p"}]], ["c"], [[4]]
    seen = []

    def witness(prompts, completions, completion_ids, answer, tags):
        seen.append((prompts[0][0]["content"], completions, completion_ids, answer, tags))
        return [0.0]

    Rewards([vandal, witness])(prompts, completions, ids, inputs)
    untouched = ("p", ["c"], [[4]], ["a"], [["x"]])
    assert seen == [untouched]
    assert (prompts[0][0]["content"], completions, ids, *inputs.values()) == untouched


def test_names_are_unique_and_weights_leave_scores_as_they_are():
    rewards = Rewards([length, Length(), length, functools.partial(length)], [0.1, 2, 0, -1])
    assert rewards.names == ["length", "Length", "length_2", "partial"]
    assert rewards.weights.tolist() == [0.1, 2, 0, -1]
    assert rewards(PROMPTS, COMPLETIONS, IDS, {})[0].nansum(0).tolist() == [1] * 4
    functions = [says([], name) for name in ("a", "a", "a_2", "a_1", "a")]
    rewards = Rewards(functions)
    assert len(set(rewards.names)) == 5
    assert rewards.weights.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("functions", "weights", "error", "message"),
    [
        ([], None, ValueError, "reward_funcs is empty"),
        ([length, 3], None, TypeError, "must be callables or reward models .*, got 3"),
        ([length, slow_length], [1.0], ValueError, "got 1 for length, slow_length"),
    ],
)
def test_invalid_functions_or_weights_raise_immediately(functions, weights, error, message):
    with pytest.raises(error, match=message):
        Rewards(functions, weights)


@pytest.mark.parametrize(
    "scores",
    [
        (1, 0, -2.5),
        np.array([1, 0, -2.5], dtype=np.float32),
        torch.tensor([1, 0, -2.5], dtype=torch.bfloat16, requires_grad=True),
        [np.float32(1), np.int64(0), torch.tensor(-2.5)],
        [True, 0, -2.5],
    ],
    ids=lambda scores: type(scores).__name__,
)
def test_any_number_sequence_is_accepted(scores):
    assert call(says(scores)).tolist() == [[1], [0], [-2.5]]
    assert call(says([0.1, 1e-300, 1 + 2**-52])).flatten().tolist() == [0.1, 1e-300, 1 + 2**-52]


@pytest.mark.fault(24, "an error names the function")
@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (torch.zeros(2), "2 scores"),
        (None, "None"),
        ({"a": 1, "b": 2, "c": 3}, "{'a': 1"),
        ((x for x in (1.0, 2.0, 3.0)), "<generator"),
    ],
    ids=lambda value: str(value).partition(" at ")[0],
)
def test_wrong_number_of_scores_raises(scores, got):
    with pytest.raises(ValueError, match=rf"reward function said .* list of 3 scores.* got {got}"):
        call(length, says(scores))


@pytest.mark.fault(23, "an error names function and completion; None of one source does not apply")
@pytest.mark.parametrize(
    ("score", "shown"),
    [
        (math.nan, "nan"),
        (torch.tensor(math.inf), r"tensor\(inf\)"),
        ("good", "'good'"),
        (1 + 2j, r"\(1\+2j\)"),
        (10**400, "10000"),
    ],
    ids=lambda x: str(x)[:9],
)
def test_invalid_score_error_names_function_and_completion(score, shown):
    message = f"reward function said returned {shown}.* for completion 1 of the call"
    with pytest.raises(ValueError, match=message):
        call(length, says([0.0, score, 1.0]))


def test_none_score_leaves_gap_in_its_column():
    scores = call(length, says([None, 5, None], "sometimes"))
    assert scores[:, 0].tolist() == [1, 2, 3]
    assert scores[:, 1].isnan().tolist() == [True, False, True]


@pytest.mark.fault(23, "None from every source is an error")
def test_completion_scored_by_no_function_raises():
    assert call(says([1, None, None]), says([None, 2, 3])).nansum(1).tolist() == [1, 2, 3]
    for none in (None, [None] * 3):
        with pytest.raises(ValueError, match=r"completion 2 .* one, two returned None"):
            call(says([None, 1, none], "one"), says([1, 1, none], "two"))


NAN = pytest.approx(math.nan, nan_ok=True)
STEPS = [[1.5], [None, 2], [0.5, None, -1.0]]
PLACED = [[1.5, NAN, NAN], [NAN, 2, NAN], [0.5, NAN, -1.0]]


@pytest.mark.parametrize(
    "scores",
    [
        STEPS,
        tuple(map(tuple, STEPS)),
        [np.array([1.5]), [None, np.float32(2)], [torch.tensor(0.5), None, -1]],
        [1.5, 2.0, STEPS[2]],  # of steps, of completions: as it comes
    ],
    ids=["lists", "tuples", "arrays", "mixed"],
)
def test_list_scores_steps_at_their_last_tokens(scores):
    assert per_token(says(scores))[:, :, 0].tolist() == PLACED
    assert call(says(scores)).tolist() == [[1.5], [2.0], [-0.5]]


def test_dense_reward_scores_every_token():
    ids, dense = [[4, 4], [5, 5]], [[0.5, 1.0], [2.0, 4.0]]
    for given in (np.array(dense), torch.tensor(dense), list(torch.tensor(dense))):
        scores = Rewards(says(given))(["p"] * 2, ["a"] * 2, ids, {})
        assert scores[:, :, 0].tolist() == dense


def test_completion_score_is_at_last_action_token():
    mask = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 1]]).bool()
    scores = per_token(length, says([[1], [5, None], [3, None, 4]]), action_mask=mask)
    assert scores[:, :, 0].tolist() == [[1, NAN, NAN], [2, NAN, NAN], [NAN, NAN, 3]]
    assert scores[:, :, 1].tolist() == [[1, NAN, NAN], [5, NAN, NAN], [3, NAN, 4]]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([1, [], 1], "a list of 0 scores for completion 1 .* has 2 tokens"),
        ([1, 1, [0.0, math.nan, 1.0]], "nan for token 1 of completion 2 of the call"),
        ([1, 1, [0.0, [1.0], 1.0]], r"\[1.0\] for token 1 of completion 2 of the call"),
        ([1, 1, [None, 0.0, 1]], "0.0 for token 1 of completion 2 .* which the policy did not"),
    ],
)
def test_invalid_steps_raise(steps, reason):
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    with pytest.raises(ValueError, match=f"said returned {reason}"):
        per_token(length, says(steps), action_mask=mask)


def failure(**_):
    raise KeyError("answer")


def test_exception_names_function_and_keeps_cause():
    with pytest.raises(ValueError, match="failure raised KeyError: 'answer'") as caught:
        call(length, failure)
    assert isinstance(caught.value.__cause__, KeyError)
    where = f'  File "{__file__}", line {failure.__code__.co_firstlineno + 1}, in failure'
    assert [x for x in str(caught.value).split("\n") if x.startswith("  File")] == [where]

    async def short(**_):
        return [1.0]

    with pytest.raises(ValueError, match="reward function short must return a list of 3 scores"):
        call(short)
    with pytest.raises(ValueError, match="said raised NotImplementedError"):
        call(says(torch.ones(3, device="meta")))


def test_function_for_text_that_gets_chats_is_told_so():
    def strips(completions):
        return [float(len(completion.strip())) for completion in completions]

    chats = [[{"role": "assistant", "content": "4"}]] * 3
    with pytest.raises(ValueError, match=r"completion\[0\]\['content'\]"):
        Rewards([strips])(chats, chats, IDS, {}, None)


def test_logged_columns_may_be_arrays_and_tensors():
    def logs(completions, log_extra):
        log_extra("array", np.arange(3))
        log_extra("tensor", torch.tensor([0.5, 1, 2]))
        log_extra("numbers", [np.float32(1), np.int64(2), None])
        return [0.0] * 3

    inputs = RewardInputs(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=IDS, columns={})
    extra = Rewards(logs).score(inputs, torch.ones(3, 3)).extra
    assert extra == {"array": [0, 1, 2], "tensor": [0.5, 1.0, 2.0], "numbers": [1.0, 2, None]}
    with pytest.raises(ValueError, match="column 'seen' has 1 values for 3 completions"):
        call(lambda log_extra: log_extra("seen", [1]))
