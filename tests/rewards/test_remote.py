"""A server that scores, against one on loopback that does whatever servers do."""

import asyncio
import gzip
import threading
import time
import zlib
from types import SimpleNamespace

import pytest

from rlhf_pg.boundary import http
from rlhf_pg.rewards.servers import HttpReward
from tests.rewards.loopback import Loopback, Said, cut_off, hang_up


def lengths(asked):
    return Said({"scores": [float(len(text)) for text in asked.body["completions"]]})


@pytest.fixture
def server():
    server = Loopback(lengths)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds between attempts, which take no time."""
    seconds, sleep = [], asyncio.sleep

    async def pause(length):
        seconds.append(length)
        await sleep(0)

    own = SimpleNamespace(**vars(asyncio) | {"sleep": pause})  # servers in other threads sleep
    monkeypatch.setattr("rlhf_pg.boundary.http.asyncio", own)
    return seconds


def scores(reward, completions=("a", "bb"), **columns):
    count = len(completions)
    given = {"prompts": ["p"] * count, "completion_ids": [[4, 5]] * count, **columns}
    return asyncio.run(reward(completions=list(completions), **given))


def failure(reward, **given):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        scores(reward, **given)
    return str(caught.value)


def test_server_gets_columns_and_scores_keep_their_order(server):
    reward = HttpReward(server.url + "/score")
    offered = {"trainer_state": object(), "log_metric": print}  # to all that take `**columns`
    assert scores(reward, ["a", "ccc", "bb"], answer=[1, 2, 3], **offered) == [1, 3, 2]
    (asked,) = server.asked
    assert asked.path == "/score"
    assert asked.body == {
        "prompts": ["p"] * 3,
        "completions": ["a", "ccc", "bb"],
        "completion_ids": [[4, 5]] * 3,
        "answer": [1, 2, 3],
    }


@pytest.mark.parametrize(
    "form", [{"scores": [1, None]}, {"rewards": [1, None]}, [1, None], b"\n[1, null]\n"]
)
def test_each_form_of_answer_is_read(server, form):
    server.answer = lambda asked: Said(form)
    assert scores(HttpReward(server.url)) == [1, None]


def test_limit_on_concurrent_requests_holds_across_calls(server):
    arrived = threading.Barrier(3, timeout=5)

    def together(asked):
        arrived.wait()  # three at a time, or never
        time.sleep(0.02)
        return lengths(asked)

    server.answer = together
    reward = HttpReward(server.url, concurrency=3)

    async def six_times():
        one = {"prompts": "p", "completions": ["a"], "completion_ids": [[4]]}
        return await asyncio.gather(*(reward(**one) for _ in range(6)))

    assert asyncio.run(six_times()) == [[1]] * 6
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    "fault",
    [hang_up, cut_off, Said(b"no room", 503), Said("slow down", 429), Said(b"<html>busy</html>")],
)
def test_transient_fault_is_retried(server, pauses, fault):
    faults = [fault]
    server.answer = lambda asked: faults.pop() if faults else lengths(asked)
    assert scores(HttpReward(server.url)) == [1, 2]
    assert pauses == [1.0]


def test_server_may_ask_for_a_longer_pause(server, pauses):
    faults = [Said(b"", 429), Said(b"", 429, {"Retry-After": "20"})]
    server.answer = lambda asked: faults.pop() if faults else lengths(asked)
    assert scores(HttpReward(server.url)) == [1, 2]
    assert pauses == [20.0, 40.0]


@pytest.mark.fault(62, "asked again after growing pauses, then one error with its words")
def test_lasting_fault_is_one_error_after_growing_pauses(server, pauses):
    server.answer = lambda asked: Said(b"\x1b[31mno room", 500)
    said = failure(HttpReward(server.url, retries=8))
    assert said == (
        f"the server at {server.url} gave status 500: \\x1b[31mno room, to /, in 9 attempts"
    )
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


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
        said = failure(HttpReward(server.url, timeout=0.1, retries=1))
    finally:
        gone.set()
    assert said == f"the server at {server.url} gave no answer within 0.1 s, to /, in 2 attempts"


@pytest.mark.fault(63, "one error with the start of what was said")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Said(b"<html>busy</html>"), "an answer that cannot be used"),
        (Said([1]), "it is not a list of 2 scores, got [1]"),
        (Said({"score": [1, 2]}), "it is not a list of 2 scores, got None"),
        (Said({"detail": "no such page"}, 404), 'refuses / with status 404: {"detail": "no such'),
    ],
)
def test_bad_answer_is_one_error(server, said, reason):
    server.answer = lambda asked: said
    text = failure(HttpReward(server.url))
    assert reason in text
    assert len(text) < 1300


def test_compressed_answer_is_read(server):
    body = gzip.compress(b'{"scores": [1, 2]}')
    server.answer = lambda asked: Said(body, 200, {"Content-Encoding": "gzip"})
    assert scores(HttpReward(server.url)) == [1, 2]


ZEROS = b"[" + b" " * 10**6


@pytest.mark.parametrize(
    ("body", "coding", "reason"),
    [
        (ZEROS, "identity", "it has more than 1000 bytes"),
        (gzip.compress(ZEROS), "gzip", "it has more than 1000 bytes"),
        (gzip.compress(gzip.compress(ZEROS)), "gzip, gzip", "Content-Encoding is gzip, gzip"),
        (zlib.compress(ZEROS), "deflate", "Content-Encoding is deflate"),
        (b"no gzip", "gzip", "incorrect header check"),
    ],
    # The header of gzip has the time: bytes in a test's name would be others in each process.
    ids=["as_it_is", "gzip", "gzip_twice", "deflate", "no_gzip"],
)
@pytest.mark.parametrize("status", [200, 500])
def test_answer_beyond_the_limit_of_size_is_failed(
    server, monkeypatch, status, body, coding, reason
):
    """Whatever it unpacks to, no more than the limit is unpacked."""
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    server.answer = lambda asked: Said(body, status, {"Content-Encoding": coding})
    said = failure(HttpReward(server.url, retries=1))
    assert reason in said
    assert server.url in said
    assert len(server.asked) == 2


@pytest.mark.fault(62, "nothing is sent to another host")
def test_redirect_to_another_host_is_not_followed(server, pauses):
    other = Loopback(lengths)
    server.answer = lambda asked: Said(b"", 307, {"Location": other.url + "/steal?token=1"})
    try:
        said = failure(HttpReward(server.url))
    finally:
        other.close()
    assert "refuses / with status 307" in said
    assert "redirects are not followed" in said
    assert other.asked == []


def test_key_is_sent_and_not_shown(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is ignored for loopback
    monkeypatch.setenv("SCORE_KEY", "sk-secret")
    reward = HttpReward(server.url, api_key_env="SCORE_KEY")
    assert scores(reward) == [1, 2]
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    server.answer = lambda asked: Said({"error": f"no: {asked.headers['authorization']}"}, 401)
    said = failure(reward)
    assert "status 401" in said
    assert "sk-secret" not in said


def test_column_that_is_no_json_is_an_error_and_nothing_is_sent(server):
    with pytest.raises(TypeError, match="bytes is not JSON"):
        scores(HttpReward(server.url), picture=[b"png", b"png"])
    assert server.asked == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "http://me:secret@host/score"}, "a user, a password"),
        ({"url": "ftp://host/score"}, "an address is http"),
        ({"api_key_env": "ABSENT_KEY"}, "there is no environment variable ABSENT_KEY"),
        ({"api_key_env": "sk-secret"}, "name the environment variable"),
    ],
)
def test_unusable_option_is_refused_before_anything_is_asked(options, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        HttpReward(**{"url": "http://127.0.0.1:9/score", **options})
    assert "secret" not in str(caught.value)
