"""A server that speaks as `vllm serve` does, and fails on demand."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

# Status, and JSON or bytes; or what writes an answer of its own to the handler's `wfile`.
Answer = tuple[int, Any] | Callable[[BaseHTTPRequestHandler], None]


class _Threads(ThreadingHTTPServer):
    request_queue_size = 256  # of connections not yet taken; a client beyond it waits a second


class FakeVllm:
    """Says ten possible tokens with equal probability, by the seed of a request.

    `answers` maps a path to what takes its place: body -> status and answer, or None for the usual.
    """

    def __init__(self, vocab_size: int = 10) -> None:
        self.vocab_size = vocab_size
        self.answers: dict[str, Callable[[Any], Answer | None]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.models = ["base"]
        self.device, self.raw, self.instance = "cuda", False, "a1"
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                said = fake.answer(self.path.split("?")[0], body)
                if callable(said):
                    with suppress(ConnectionError):
                        said(self)
                    return
                status, answer = said
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                # One that is cut off has promised more.
                self.send_header("Content-Length", str(len(text) + 10 * (answer == b"{")))
                self.end_headers()
                with suppress(ConnectionError):  # who asked has not waited
                    self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = _Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = self.server.serve_forever
        Thread(target=serve, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    def answer(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        special = self.answers.get(path, lambda body: None)(body)
        return special or getattr(self, "on_" + path.replace("/", "_").strip("_"))(body)

    def on_version(self, body: Any) -> Answer:
        return 200, {"version": "0.32.1"}

    def on_v1_models(self, body: Any) -> Answer:
        return 200, {"data": [{"id": name, "max_model_len": 40} for name in self.models]}

    def on_server_info(self, body: Any) -> Answer:
        return 200, {"vllm_config": {"device_config": self.device, "instance_id": self.instance}}

    def on_v1_load_lora_adapter(self, body: Any) -> Answer:
        self.models.append(body["lora_name"])
        return 200, b"Success: LoRA adapter added"

    def on_v1_unload_lora_adapter(self, body: Any) -> Answer:
        self.models.remove(body["lora_name"])
        return 200, b"Success: LoRA adapter removed"

    def on_collective_rpc(self, body: Any) -> Answer:
        return 200, {"results": [None]}

    def on_reset_prefix_cache(self, body: Any) -> Answer:
        return 200, {"success": True}

    def on_v1_completions(self, body: Any) -> Answer:
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        noise, tokens = random.Random(body.get("seed")), []
        while len(tokens) < body["max_tokens"]:
            tokens.append(noise.randrange(self.vocab_size))
            if tokens[-1] in body.get("stop_token_ids", []):
                break
        stopped = tokens[-1] in body.get("stop_token_ids", [])
        logprob = -1.0 if self.raw else -1.0 / (body["temperature"] or 1.0)
        logprobs = {
            "token_logprobs": [logprob] * len(tokens),
            "top_logprobs": [{f"token_id:{token}": logprob} for token in tokens],
        }
        reason = "stop" if stopped else "length"
        choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
        return 200, {"model": body["model"], "choices": [choice]}
