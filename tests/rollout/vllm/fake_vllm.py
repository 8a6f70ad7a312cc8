"""A server that speaks as `vllm serve` does, and fails on demand."""

import hashlib
import random
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from torch import Tensor

from tests.rewards import loopback
from tests.rewards.loopback import Asked, Loopback, Said, cut_off

# Status, and JSON or bytes; or what writes an answer of its own to the handler's `wfile`.
Answer = tuple[int, Any] | Callable[[BaseHTTPRequestHandler], None]


class FakeVllm:
    """Says ten possible tokens with equal probability, by the seed of a request.

    `answers` maps a path to what takes its place: body -> status and answer, or None for the usual.
    The answer b"{" is cut off.
    """

    def __init__(self, vocab_size: int = 10) -> None:
        self.vocab_size = vocab_size
        self.answers: dict[str, Callable[[Any], Answer | None]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.models = ["base"]
        self.device, self.raw, self.instance = "cuda", False, "a1"
        self.held: dict[str, Tensor] = {}  # the server's own tensors
        self.server = Loopback(self.reply)
        self.url, self.close = self.server.url, self.server.close

    def reply(self, asked: Asked) -> loopback.Answer:
        said = self.answer(asked.path.split("?")[0], asked.body)
        if callable(said):
            return said
        return cut_off if said[1] == b"{" else Said(said[1], said[0])

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

    def on_weight_checker(self, body: Any) -> Answer:
        """As vllm/entrypoints/rl/online/api_router.py of 0.32 and 0.33."""
        assert body == {"action": "checksum"}
        return 200, {"checksums": digests_of(self.held)}

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


def digests_of(held: dict[str, Tensor]) -> dict[str, str]:
    """As vllm/model_executor/model_loader/weight_checksum.py of 0.32 and 0.33, on one GPU."""
    digests = {}
    for name, tensor in held.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        digests[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(data).hexdigest()
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
