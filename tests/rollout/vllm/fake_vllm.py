"""A server that speaks as `vllm serve` does, and fails on demand."""

import base64
import hashlib
import math
import random
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from queue import Queue
from threading import Event
from typing import Any

import torch
from torch import Tensor

from tests.rewards import loopback
from tests.rewards.loopback import Asked, Loopback, Said, cut_off

# Status, and JSON or bytes; or what writes an answer of its own to the handler's `wfile`.
Answer = tuple[int, Any] | Callable[[BaseHTTPRequestHandler], None]


VERSIONS = ("/pause", "/resume", "/weight_info", "/update_weight_version")


class FakeVllm:
    """Says ten possible tokens with equal probability, by the seed of a request.

    `answers` maps a path to what takes its place: body -> status and answer, or None for the usual.
    The answer b"{" is cut off.
    """

    def __init__(self, vocab_size: int = 10, version: str = "0.33.0") -> None:
        self.vocab_size = vocab_size
        self.version = version
        self.weight_version = "default"
        self.has_versions = True  # whether it has `VERSIONS`
        self.instance = "a1"
        self.goes_on = Event()  # cleared while it is paused
        self.goes_on.set()
        self.answers: dict[str, Callable[[Any], Answer | None]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.models = ["base"]
        self.device, self.raw = "cuda", False
        self.quantization: str | None = None
        self.backend: str | None = None  # of weight transfer
        self.identities: Queue[bytes] = Queue()  # of the communicators that it joins
        self.wire: Queue[Tensor] = Queue()
        self.held: dict[str, Tensor] = {}  # the server's own tensors
        self.server = Loopback(self.reply)
        self.url, self.close = self.server.url, self.server.close

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")[:2]))

    def reply(self, asked: Asked) -> loopback.Answer:
        said = self.answer(asked.path.split("?")[0], asked.body)
        if callable(said):
            return said
        return cut_off if said[1] == b"{" else Said(said[1], said[0])

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    def answer(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if not self.has_versions and path in VERSIONS:
            return 404, {"detail": "Not Found"}
        special = self.answers.get(path, lambda body: None)(body)
        return special or getattr(self, "on_" + path.replace("/", "_").strip("_"))(body)

    def on_version(self, body: Any) -> Answer:
        return 200, {"version": self.version}

    # As vllm/entrypoints/rl/online/api_router.py of 0.33, which differs from that of 0.28 only in
    # `weight_checker` (from 0.32 on).

    def on_pause(self, body: Any) -> Answer:
        self.goes_on.clear()
        return 200, {"status": "paused"}

    def on_resume(self, body: Any) -> Answer:
        self.goes_on.set()
        return 200, {"status": "resumed"}

    def on_weight_info(self, body: Any) -> Answer:
        return 200, {"weight_version": self.weight_version}

    def on_update_weight_version(self, body: Any) -> Answer:
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": self.weight_version}

    def on_v1_models(self, body: Any) -> Answer:
        return 200, {"data": [{"id": name, "max_model_len": 40} for name in self.models]}

    def on_server_info(self, body: Any) -> Answer:
        config = {
            "device_config": self.device,
            "instance_id": self.instance,
            "model_config": {"quantization": self.quantization},
            "weight_transfer_config": self.backend and {"backend": self.backend},
        }
        return 200, {"vllm_config": config}

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

    # As a worker of 0.32 and 0.33: nccl_engine.py and packed_tensor.py in
    # vllm/distributed/weight_transfer. `wire` has the bytes of each broadcast.

    def on_get_world_size(self, body: Any) -> Answer:
        return 200, {"world_size": 2}

    def on_init_weight_transfer_engine(self, body: Any) -> Answer:
        info = body["init_info"]
        identity = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        assert len(identity) == 128
        self.identities.put(identity)
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 3, True)
        self.buffer_size = info["packed_buffer_size_bytes"]
        return 200, {"message": "Weight transfer initialized"}

    def on_start_weight_update(self, body: Any) -> Answer:
        self.received: dict[str, Tensor] = {}
        return 200, {"message": "Weight update started"}

    def on_update_weights(self, body: Any) -> Answer:
        info = body["update_info"]
        waiting: list[tuple[str, torch.dtype, list[int], int]] = []
        for name, dtype_name, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            dtype = getattr(torch, dtype_name)
            waiting.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            if sum(size for *_, size in waiting) > self.buffer_size:
                self._receive(waiting)
                waiting = []
        if waiting:
            self._receive(waiting)
        return 200, {"message": "Weights updated"}

    def _receive(self, waiting: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        packed = self.wire.get(timeout=30)
        parts = packed.split([size for *_, size in waiting])
        for (name, dtype, shape, _), part in zip(waiting, parts, strict=True):
            self.received[name] = part.contiguous().view(dtype).view(shape)

    def on_finish_weight_update(self, body: Any) -> Answer:
        return 200, {"message": "Weight update finished"}

    def on_weight_checker(self, body: Any) -> Answer:
        if self.number < (0, 32):
            return 404, {"detail": "Not Found"}
        assert body == {"action": "checksum"}
        return 200, {"checksums": digests_of(self.held)}

    def on_v1_completions(self, body: Any) -> Answer:
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.goes_on.wait(30)  # paused with `keep`, it takes requests and computes none
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
        if self.number >= (0, 33):
            span = {"version": self.weight_version, "start": 0, "end": len(tokens)}
            asked = body.get("return_weight_versions", False)
            choice["weight_versions"] = [span] if asked else None
        return 200, {"model": body["model"], "choices": [choice]}


def digests_of(held: dict[str, Tensor]) -> dict[str, str]:
    """As vllm/model_executor/model_loader/weight_checksum.py of 0.32 and 0.33, on one GPU."""
    digests = {}
    for name, tensor in held.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        key = name if ":" in name else f"dp0:pp0:pcp0:tp0:{name}"
        digests[key] = hashlib.sha256(data).hexdigest()
    return digests


def joined(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of vLLM's Llama, made from a checkpoint: joined, and the vocabulary padded."""
    held = {}
    for name, tensor in given.items():
        if "k_proj" in name or "v_proj" in name or "up_proj" in name:
            continue
        if "q_proj" in name:
            parts = [given[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            name, tensor = name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        if "gate_proj" in name:
            parts = [tensor, given[name.replace("gate_proj", "up_proj")]]
            name, tensor = name.replace("gate_proj", "gate_up_proj"), torch.cat(parts)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])])
        held[name] = tensor
    return held
