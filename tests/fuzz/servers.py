"""Servers whose answers were changed on the way: in their JSON, their bytes or their headers."""

import copy
import gzip
import json
import random
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from rlhf_pg.rollout.vllm import http
from tests.fuzz.case import Case, small
from tests.rollout.vllm.fake_vllm import FakeVllm

PATHS = ["/v1/completions"] * 5 + ["/v1/models", "/version", "/server_info", "/collective_rpc"]
PATHS += ["/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
VALUES = [None, True, -1, 0.5, 10**30, float("nan"), float("-inf"), "", "\x1b[2J", [], {}, [None]]
STATUSES = [201, 204, 206, 300, 301, 304, 308, 400, 401, 403, 408, 413, 418, 429, 499]
STATUSES += [500, 501, 502, 504, 507, 599]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in JSON."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def replaced(value: Any, rng: random.Random) -> Any:
    """One thing in it is another."""
    new, place = rng.choice(VALUES), rng.choice(places(value))
    if not place:
        return new
    changed = inner = copy.deepcopy(value)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return changed


def without(value: Any, rng: random.Random) -> Any:
    """One thing in it is missing."""
    there = [place for place in places(value) if place]
    if not there:
        return None
    changed = inner = copy.deepcopy(value)
    place = rng.choice(there)
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    return changed


def twice(value: Any, rng: random.Random) -> Any:
    """One list in it is twice as long."""
    changed = copy.deepcopy(value)
    for place in places(changed):
        inner = changed
        for key in place:
            inner = inner[key]
        if isinstance(inner, list) and rng.random() < 0.5:
            inner += copy.deepcopy(inner)
            break
    return changed


def raw(bytes_: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: handler.wfile.write(bytes_)


def framed(text: bytes, *headers: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    return raw(b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"Connection: close", b"", text]))


def cut(text: bytes, rng: random.Random) -> Any:
    whole = b"Content-Length: %d" % len(text)
    return framed(text[: rng.randrange(len(text) + 1)], whole)


def flipped(text: bytes, rng: random.Random) -> Any:
    bad = bytearray(text or b" ")
    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return 200, bytes(bad)


# What becomes of the JSON of an answer, or of its bytes.
CHANGED: dict[str, Callable[[Any, random.Random], Any]] = {
    "one value replaced": lambda v, rng: (200, replaced(v, rng)),
    "two values replaced": lambda v, rng: (200, replaced(replaced(v, rng), rng)),
    "one entry missing": lambda v, rng: (200, without(v, rng)),
    "one list doubled": lambda v, rng: (200, twice(v, rng)),
    "a status by chance": lambda v, rng: (rng.choice(STATUSES), v),
    "a status by chance, without a body": lambda v, rng: (rng.choice(STATUSES), b""),
    "the answer in a list": lambda v, rng: (200, [v]),
}
MANGLED: dict[str, Callable[[bytes, random.Random], Any]] = {
    "bytes cut off": cut,
    "a bit flipped": flipped,
    "more than was promised": lambda t, _: framed(t + b"{}", b"Content-Length: %d" % len(t)),
    "two lengths": lambda t, _: framed(t, b"Content-Length: 5", b"Content-Length: 7"),
    "a length below 0": lambda t, _: framed(t, b"Content-Length: -1"),
    "a length of 10^30": lambda t, _: framed(t, b"Content-Length: 1" + b"0" * 30),
    "chunks that are none": lambda t, _: framed(t, b"Transfer-Encoding: chunked"),
    "a chunk of endless size": lambda t, _: framed(b"f" * 99, b"Transfer-Encoding: chunked"),
    "zipped bytes": lambda t, _: framed(gzip.compress(t), b"Content-Encoding: gzip"),
    "zipped bytes that are none": lambda t, _: framed(t, b"Content-Encoding: gzip"),
    "an unknown encoding": lambda t, _: framed(t, b"Content-Encoding: br, zstd"),
    "UTF-16": lambda t, _: (200, t.decode().encode("utf-16")),
    "a byte order mark": lambda t, _: (200, b"\xef\xbb\xbf" + t),
    "bytes that are no UTF-8": lambda t, _: (200, t.replace(b"e", b"\xff")),
    "NUL bytes": lambda t, _: (200, t + b"\x00" * 9),
    "an integer of 10,000 digits": lambda t, _: (200, b'{"a": ' + b"9" * 10_000 + b"}"),
    "headers without an end": lambda t, _: raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000),
    "a header without a colon": lambda t, _: framed(t, b"nonsense"),
    "a header of escapes": lambda t, _: framed(t, b"X-A: \x1b[2J"),
    "another protocol": lambda t, _: raw(b"RFB 003.008\n"),
    "HTTP/9": lambda t, _: raw(b"HTTP/9.9 200 OK\r\n\r\n" + t),
    "a status that is no number": lambda t, _: raw(b"HTTP/1.1 two hundred\r\n\r\n" + t),
    "endless 100 Continue": lambda t, _: raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a switch of protocols": lambda t, _: raw(b"HTTP/1.1 101 Go\r\nUpgrade: a\r\n\r\n"),
    "nothing": lambda t, _: raw(b""),
    "a redirect to a file": lambda t, _: raw(
        b"HTTP/1.1 302 Go\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
    ),
    "a redirect to itself": lambda t, _: raw(b"HTTP/1.1 307 Go\r\nLocation: .\r\n\r\n"),
}


def draw(rng: random.Random, number: int) -> Case:
    """The fault of this number, in an answer by chance, once or from then on."""
    faults: list[tuple[str, Any]] = [*CHANGED.items(), *MANGLED.items()]
    what, change = faults[number % len(faults)]
    path, first = rng.choice(PATHS), rng.randrange(8)
    lasting, adapter = rng.random() < 0.5, path.endswith("adapter") or rng.random() < 0.3
    noise = random.Random(rng.random())

    def run(output: Path) -> Any:
        http.PAUSE = 0.0
        server, seen = FakeVllm(vocab_size=20), []

        def answer(body: Any) -> Any:
            seen.append(path)
            if len(seen) <= first or (not lasting and len(seen) > first + 1):
                return None
            _, usual = getattr(server, "on_" + path.replace("/", "_").strip("_"))(body)
            if what in MANGLED or isinstance(usual, bytes):
                text = usual if isinstance(usual, bytes) else json.dumps(usual).encode()
                if what in CHANGED:
                    return noise.choice(STATUSES), text
                return change(text, noise)
            return change(usual, noise)

        server.answers[path] = answer
        return small(
            output,
            rollout_engine="vllm_server",
            vllm_server_base_url=server.url,
            vllm_server_timeout=3.0,
            use_peft=adapter,
        )

    return Case(
        kind="server",
        what=f"{what} at {path} from answer {first + 1} on{'' if lasting else ', once'}",
        run=run,
        names=("server", "vLLM"),
    )
