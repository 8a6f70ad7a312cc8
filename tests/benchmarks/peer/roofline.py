"""What a step needs at least, and how fast this machine could be.

Counted is what no arrangement spares: a prompt's tokens once per group, a completion's but its last
(nothing follows EOS), attention to what is before a token, the head where a token is predicted; in
an update three times a forward pass. An old policy is not scored: the sampler has its
log-probabilities. Bytes are those of weights, read once per decoding step and per forward or
backward pass; of the gradients, and of what AdamW reads and writes; and in the rollout of keys and
values, a prompt's once per group and step. Activations are not counted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from tests.benchmarks.peer.workload import Job, Workload, device, synchronize


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes."""

    operations: float
    bytes: float

    def seconds(self, rates: "Work") -> float:
        return max(self.operations / rates.operations, self.bytes / rates.bytes)


def needed(job: Job, config: PreTrainedConfig) -> dict[str, Work]:
    """By phase."""
    size = getattr(torch, job.dtype).itemsize
    forward = _forward(job.workload, config)
    weights = size * (_layers(config) + config.vocab_size * config.hidden_size)
    longest = job.workload.lengths.max().item()
    decoding = longest * weights + size * _keys_read(job.workload, config)
    return {
        "rollout": Work(forward, decoding),
        "score": Work(forward, weights) if job.beta else Work(0, 0),
        # Two passes, the gradient written, and AdamW: 4 tensors read and 3 written.
        "update": Work(3 * forward, 10 * weights),
    }


def _layers(config: PreTrainedConfig) -> int:
    """Weights of the matrices of all layers."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    attention = 2 * width * head * (config.num_attention_heads + config.num_key_value_heads)
    return config.num_hidden_layers * (attention + 3 * width * config.intermediate_size)


def _forward(workload: Workload, config: PreTrainedConfig) -> float:
    """Operations of a forward pass over all groups; a multiplication and an addition are two."""
    tokens = pairs = predicted = 0
    for prompt, lengths in zip(workload.prompt_lengths, workload.lengths.tolist(), strict=True):
        inputs = [length - 1 for length in lengths]
        tokens += prompt + sum(inputs)
        pairs += prompt * (prompt + 1) // 2
        pairs += sum(prompt * n + n * (n + 1) // 2 for n in inputs)
        predicted += 1 + sum(inputs)
    attention = 2 * config.hidden_size * config.num_hidden_layers * pairs
    head = config.vocab_size * config.hidden_size * predicted
    return 2.0 * (_layers(config) * tokens + attention + head)


def _keys_read(workload: Workload, config: PreTrainedConfig) -> int:
    """Numbers of keys and values that decoding reads."""
    heads = config.num_key_value_heads / config.num_attention_heads
    each = int(2 * config.num_hidden_layers * config.hidden_size * heads)
    columns = 0
    for prompt, lengths in zip(workload.prompt_lengths, workload.lengths.tolist(), strict=True):
        columns += prompt * (max(lengths) - 1) + sum(n * (n - 1) // 2 for n in lengths)
    return each * columns


def measured(dtype: torch.dtype) -> Work:
    """Operations per second of a matrix product, bytes per second (read and written) of a copy."""
    on_gpu = device().type == "cuda"
    size = 8192 if on_gpu else 1024
    left, right = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    source = torch.ones((2**30 if on_gpu else 2**28), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return Work(
        operations=2 * size**3 / _shortest(lambda: left @ right),
        bytes=2 * source.nbytes / _shortest(lambda: target.copy_(source)),
    )


def _shortest(function: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of the fastest call."""
    seconds = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
