"""A server that scores, against one on loopback that does whatever servers do."""

import asyncio
import json
import pickle
import threading
import time

import pytest

from rlhf_pg.rewards import Rewards
from rlhf_pg.rewards.remote import HttpReward
from tests.rewards.loopback import Loopback, Pauses, Said, cut_off, hang_up


def lengths(asked):
    return Said({"scores": [float(len(text)) for text in asked.body["completions"]]})


@pytest.fixture
def server():
    server = Loopback(lengths)
    yield server
    server.close()


@pytest.fixture
def pauses():
    return Pauses()


def scores(reward, completions=("a", "bb"), **columns):
    count = len(completions)
    given = {"prompts": ["p"] * count, "completion_ids": [[4, 5]] * count, **columns}
    return asyncio.run(reward(completions=list(completions), **given))


def failure(reward, **given):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        scores(reward, **given)
    return str(caught.value)


# ------------------------------------------------------------------------------ what is said


def test_server_gets_batches_with_columns_and_scores_keep_their_order(server):
    reward = HttpReward(server.url + "/score", batch_size=2)
    completions = ["a", "bb", "ccc", "dddd", "eeeee"]
    offered = {"trainer_state": object(), "log_metric": print}  # to all that take `**columns`
    assert scores(reward, completions, answer=[1, 2, 3, 4, 5], **offered) == [1, 2, 3, 4, 5]
    assert {asked.path for asked in server.asked} == {"/score"}
    bodies = sorted((asked.body for asked in server.asked), key=lambda body: body["answer"])
    assert [body["completions"] for body in bodies] == [
        completions[:2],
        completions[2:4],
        ["eeeee"],
    ]
    assert bodies[2] == {
        "prompts": ["p"],
        "completions": ["eeeee"],
        "completion_ids": [[4, 5]],
        "answer": [5],
    }


@pytest.mark.parametrize("form", [{"scores": [1, None]}, {"rewards": [1, None]}, [1, None]])
def test_each_form_of_answer_is_read(server, form):
    server.answer = lambda asked: Said(form)
    assert scores(HttpReward(server.url)) == [1, None]


def test_reward_of_trainer_is_named_by_host_and_path(server):
    chat = [[{"role": "assistant", "content": "hello"}]]
    server.answer = lambda asked: Said([[None, 2.5] for _ in asked.body["completions"]])
    rewards = Rewards([HttpReward(server.url + "/v1/score/")])
    assert rewards.names == [server.url.removeprefix("http://") + "/v1/score"]
    paid = rewards([[{"role": "user", "content": "hi"}]], chat, [[4, 5]], {})
    assert paid.nansum().item() == 2.5
    assert server.asked[0].body["completions"] == chat


def test_limit_on_concurrent_requests_holds_across_calls(server):
    arrived = threading.Barrier(3, timeout=5)

    def together(asked):
        arrived.wait()  # three at a time, or never
        time.sleep(0.02)
        return lengths(asked)

    server.answer = together
    reward = HttpReward(server.url, batch_size=1, concurrency=3)

    async def twice():
        one = {"prompts": "ppp", "completions": ["a", "b", "c"], "completion_ids": [[4]] * 3}
        return await asyncio.gather(reward(**one), reward(**one))

    assert asyncio.run(twice()) == [[1, 1, 1]] * 2
    assert server.most_at_once == 3


def test_reward_works_after_pickling_and_on_another_event_loop(server):
    reward = HttpReward(server.url + "/score")
    for each in (reward, reward, pickle.loads(pickle.dumps(reward))):
        assert scores(each) == [1, 2]
        assert each.__name__.endswith("/score")


# --------------------------------------------------------------------------- asked once more


@pytest.mark.parametrize(
    ("fault", "paused"),
    [
        (hang_up, 1.0),
        (cut_off, 1.0),
        (Said(b"no room", 503), 1.0),
        (Said("slow down", 429), 1.0),
        (Said("slow down", 429, {"Retry-After": "7"}), 7.0),
        (Said("later", 503, {"Retry-After": "0"}), 0.0),
        # A date would need the wall clock.
        (Said("slow down", 429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), 1.0),
    ],
)
def test_transient_fault_is_retried(server, pauses, fault, paused):
    faults = [fault]
    server.answer = lambda asked: faults.pop() if faults else lengths(asked)
    assert scores(HttpReward(server.url, pause=pauses)) == [1, 2]
    assert pauses.seconds == [paused]


@pytest.mark.fault(62, "asked again after growing pauses, then one error with its words")
def test_lasting_fault_is_one_error_after_growing_pauses(server, pauses):
    server.answer = lambda asked: Said(b"\x1b[31mno room", 500)
    said = failure(HttpReward(server.url, retries=8, pause=pauses))
    assert said == f"{server.url} gave status 500: \\x1b[31mno room, in 9 attempts"
    assert pauses.seconds == [1, 2, 4, 8, 16, 32, 60, 60]


def test_unreachable_server_is_one_error(server, pauses):
    server.close()
    said = failure(HttpReward(server.url, retries=2, pause=pauses))
    assert "gave no answer (" in said
    assert "ConnectionRefusedError" in said
    assert len(pauses.seconds) == 2


def test_server_that_asks_for_too_long_a_pause_is_not_waited_for(server, pauses):
    server.answer = lambda asked: Said("later", 429, {"Retry-After": "86400"})
    assert "asks us to come back in 86400 s" in failure(HttpReward(server.url, pause=pauses))
    assert pauses.seconds == []
    assert len(server.asked) == 1


@pytest.mark.fault(62, "given up after its timeout, for every attempt")
@pytest.mark.parametrize("drips", [False, True])
def test_hanging_or_dripping_server_times_out(server, pauses, drips):
    gone = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(900):  # it then sends an answer: no error if nobody minds the time
            if not gone.wait(0.02):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        handler.wfile.write(b"[1.0]".ljust(100))

    def hang(handler):
        gone.wait(60)

    server.answer = lambda asked: drip if drips else hang
    try:
        said = failure(HttpReward(server.url, timeout=0.1, retries=1, pause=pauses))
    finally:
        gone.set()
    assert said == f"{server.url} gave no answer within 0.1 s, in 2 attempts"


# ------------------------------------------------------------------------------- one error


@pytest.mark.fault(63, "one error with the start of what was said")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Said(b"<html>busy</html>"), "gave what is not JSON: <html>busy</html>"),
        (Said(b""), "gave what is not JSON: nothing"),
        (Said(b"[" * 100_000), "gave what is not JSON: [[["),
        (Said(b'{"scores": [NaN, 1]}'), 'gave what is not JSON: {"scores": [NaN, 1]}'),
        (Said(b"[1e999, 1]"), "gave inf for completion 0"),
        (Said([1]), "gave 1 scores for 2 completions (from number 0 on): [1]"),
        (Said([1, 2, 3]), "gave 3 scores for 2 completions"),
        (Said({"score": [1, 2]}), "must answer with a list of scores"),
        (Said({"scores": 1}), "must answer with a list of scores"),
        (Said("right"), "must answer with a list of scores"),
        (Said([1, "2"]), "gave '2' for completion 1"),
        (Said([1, [None, "x"]]), "gave [None, 'x'] for completion 1"),
        (Said({"detail": "no such page"}, 404), 'refuses with status 404: {"detail": "no such'),
    ],
)
def test_bad_answer_is_one_error_without_another_attempt(server, pauses, said, reason):
    server.answer = lambda asked: said
    text = failure(HttpReward(server.url, pause=pauses))
    assert text.startswith(f"{server.url} {reason}")
    assert len(text) < 1300
    assert (len(server.asked), pauses.seconds) == (1, [])


@pytest.mark.fault(62, "no more is read than an answer may have")
def test_huge_answer_is_not_read_to_its_end(server, pauses):
    sent = []

    def flood(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 30))
        handler.end_headers()
        for _ in range(1 << 10):
            handler.wfile.write(b" " * (1 << 20))
            sent.append(1)

    server.answer = lambda asked: flood
    said = failure(HttpReward(server.url, most=1 << 16, pause=pauses))
    assert said.endswith("gave an answer too long: it has more than 65536 bytes")
    assert len(sent) < 1 << 9


@pytest.mark.fault(62, "nothing is sent to another host")
def test_redirect_to_another_host_is_not_followed(server, pauses):
    other = Loopback(lengths)
    server.answer = lambda asked: Said(b"", 307, {"Location": other.url + "/steal?token=1"})
    try:
        said = failure(HttpReward(server.url, pause=pauses))
    finally:
        other.close()
    assert said.endswith(f"sends us elsewhere (status 307, to {other.url}/steal?***)")
    assert other.asked == []


def test_key_is_sent_and_hidden_when_server_repeats_it(server, monkeypatch):
    monkeypatch.setenv("SCORE_KEY", "sk-secret")
    reward = HttpReward(server.url, api_key_env="SCORE_KEY")
    assert scores(reward) == [1, 2]
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    padding = "x" * 995  # the error is cut within the key
    for body in (Said(f"wrong key sk-secret {padding}", 401), Said(f"{padding}sk-secret".encode())):
        server.answer = lambda asked, body=body: body
        said = failure(reward)
        assert "sk-s" not in said
        assert "***" in said


@pytest.mark.parametrize("said", [{"error": "k"}, ["k"], ["k", 1]])
def test_key_is_hidden_in_answer_that_is_no_score(server, monkeypatch, said):
    monkeypatch.setenv("SCORE_KEY", "sk-secret")
    server.answer = lambda asked: Said(json.loads(json.dumps(said).replace('"k"', '"sk-secret"')))
    text = failure(HttpReward(server.url, api_key_env="SCORE_KEY"))
    assert "sk-s" not in text
    assert "'***'" in text


def test_failing_batch_cancels_the_others(server):
    hung, waited = threading.Event(), []

    def answer(asked):
        if asked.body["completions"] == ["bad"]:
            return Said([])
        waited.append(hung.wait(60))
        return lengths(asked)

    server.answer = answer
    try:
        said = failure(HttpReward(server.url, batch_size=1), completions=("a", "bad", "c"))
        assert not waited  # the others are still at it
    finally:
        hung.set()
    assert "gave 0 scores for 1 completions (from number 1 on)" in said


def test_column_that_is_no_json_is_named_and_nothing_is_sent(server):
    said = failure(HttpReward(server.url), picture=[b"png", b"png"])
    assert "the column picture cannot be sent" in said
    assert "the column weight cannot" in failure(HttpReward(server.url), weight=[1.0, float("nan")])
    assert server.asked == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "ftp://host/score"}, "the address must be http"),
        ({"url": "http://"}, "the address must be http"),
        ({"url": "http://me:secret@host/score"}, "holds a user, a password"),
        ({"url": "http://host/score?token=secret"}, "holds a user, a password"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": "soon"}, "timeout must be a number"),
        ({"retries": -1}, "retries must be a whole number, at least 0"),
        ({"concurrency": 0}, "concurrency must be a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, at least 1"),
        ({"api_key_env": "ABSENT_KEY"}, "the environment variable ABSENT_KEY is not set"),
        ({"api_key_env": "sk-secret"}, "must be the name of an environment variable"),
        ({"api_key_env": "BROKEN_KEY"}, "holds a character that no key has"),
    ],
)
def test_unusable_option_is_refused_before_anything_is_asked(monkeypatch, options, reason):
    monkeypatch.setenv("BROKEN_KEY", "sk-secret\nHost: evil")
    with pytest.raises(ValueError, match=reason) as caught:
        HttpReward(**{"url": "http://127.0.0.1:9/score", **options})
    assert "secret" not in str(caught.value)


def test_environment_proxy_is_ignored_for_loopback(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert scores(HttpReward(server.url, retries=0)) == [1, 2]
