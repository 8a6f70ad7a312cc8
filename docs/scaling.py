"""The table of docs/distributed.md: a step of GRPO on paper, and how far the same formulas are off
on published throughputs. None of it is measured here; `make docs` puts it into the page.
"""

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import torch

from rlhf_pg.run.token_budget import SHARDINGS, memory_by_part

GIB = 2**30
DDP, _, ZERO2, _, FSDP2 = SHARDINGS
ONE = [torch.nn.Parameter(torch.empty(1, dtype=torch.bfloat16, device="meta"))]


class GPU(NamedTuple):
    """One GPU, as its makers state it on nvidia.com (the H20's from the HGX H20 brief)."""

    flops: float  # dense bfloat16, per second
    bandwidth: float  # bytes per second of its own memory
    link: float  # bytes per second in each direction, to the others of a machine
    network: float  # bytes per second in each direction, through all cards of a machine


H100 = GPU(989e12, 3.35e12, 450e9, 400e9)  # SXM5; DGX H100: eight cards of 400 Gb/s
H100_HBM2E = GPU(989e12, 2.4e12, 450e9, 400e9)  # as torchtitan states those that it measured on
A100 = GPU(312e12, 2.039e12, 300e9, 200e9)  # SXM4, 80 GB; DGX A100: eight cards of 200 Gb/s
A100_40GB = GPU(312e12, 1.555e12, 300e9, 200e9)
H20 = GPU(148e12, 4.0e12, 450e9, 400e9)
MACHINE = 8  # GPUs

# Fitted to the published throughputs below:
EFFICIENCY = 0.8  # share of the peak of matrix products
TRAFFIC = 44  # times that a layer's numbers are read or written in a forward pass
HOST = 1.7e-3  # seconds that the engine's host adds to each sampled position
# Assumed:
READ = 0.85  # share of the bandwidth that a large read reaches
KERNEL, KERNELS = 2e-6, 12  # seconds of a small kernel in vLLM's CUDA graph; kernels of a layer
EXPOSED = 0.2  # share of an exchange that no computing hides
RESERVE = 0.25  # of a GPU's 80 GiB, for activations, logits, keys and values


class Model(NamedTuple):
    """A dense decoder whose MLP has three matrices, by its config on the Hub."""

    layers: int
    hidden: int
    attention: int  # query heads times their width
    keys: int  # key-value heads times their width
    inner: int
    vocabulary: int
    tied: bool = False  # the head is the embedding

    @property
    def read(self) -> int:
        """The parameters that a token passes through: all but the embedding."""
        layer = 2 * self.attention + 2 * self.keys + 3 * self.inner
        return self.hidden * (self.layers * layer + self.vocabulary)

    @property
    def parameters(self) -> int:
        return self.read + (0 if self.tied else self.vocabulary * self.hidden)


MODELS = {
    "Qwen3-0.6B": Model(28, 1024, 2048, 1024, 3072, 151_936, tied=True),
    "Qwen2.5-1.5B": Model(28, 1536, 1536, 256, 8960, 151_936, tied=True),
    "Qwen3-4B": Model(36, 2560, 4096, 1024, 9728, 151_936, tied=True),
    "Llama-3-8B": Model(32, 4096, 4096, 1024, 14336, 128_256),
    "Qwen2.5-14B": Model(48, 5120, 5120, 1024, 13824, 152_064),
    "Qwen2.5-32B": Model(64, 5120, 5120, 1024, 27648, 152_064),
    "Llama-3-70B": Model(80, 8192, 8192, 1024, 28672, 128_256),
}
LLAMA_2_13B = Model(40, 5120, 5120, 5120, 13824, 32_000)

# A step on each GPU: 8 prompts of 256 tokens, each with 16 completions of 1024; one update.
PROMPTS, PROMPT, ROWS, WIDTH, MICRO_BATCH = 8, 256, 128, 1024, 16384
TOKENS = PROMPTS * PROMPT + ROWS * WIDTH


def train_seconds(gpu: GPU, model: Model, tokens: float, context: float, passes: float) -> float:
    """Estimate the seconds of an update on `tokens` that attend to `context` others on average.

    passes ((2 read + 4 L attention context) tokens / (0.8 peak)
            + 44 2 L (hidden + attention + inner) tokens / (0.85 bandwidth))

    Args:
        passes: 3 for forward and backward, 4 with recomputing.
    """
    work = (2 * model.read + 4 * model.layers * model.attention * context) * tokens
    numbers = model.layers * (model.hidden + model.attention + model.inner) * tokens
    moved = 2 * TRAFFIC * numbers / (READ * gpu.bandwidth)
    return passes * (work / (EFFICIENCY * gpu.flops) + moved)


def position_seconds(gpu: GPU, model: Model, rows: float, context: float, gpus: int = 1) -> float:
    """Estimate the seconds of one sampled position: kernels, host, weights or products, cache."""
    weights = 2 * model.read / (READ * gpu.bandwidth)
    products = 2 * model.read * rows / (EFFICIENCY * gpu.flops)
    cache = rows * context * 4 * model.layers * model.keys / (READ * gpu.bandwidth)
    fixed = HOST + model.layers * KERNELS * KERNEL
    return fixed + (max(weights, products) + cache) / gpus


def steps() -> str:
    """Return the table: the simplest sharding that fits, bytes by stage, seconds and traffic."""
    head = ("update, GiB", "rollout, GiB", "sampling, s", "update, s", "exchange, s", "sent, GiB")
    rows = [row for name in MODELS for n in (1, 8, 64, 512) if (row := step(name, n))]
    return table(["", "GPUs", "", *head], rows)


def step(name: str, processes: int) -> list[str]:
    """Return the row of a model, or nothing if it does not fit on so many GPUs.

    Where the engine's copy does not fit beside the shards, vLLM samples on as many GPUs again,
    eight of which share a model.
    """
    model, context, limit = MODELS[name], PROMPT + WIDTH / 2, (1 - RESERVE) * 80
    for layout, serves in ((DDP, False), (ZERO2, False), (FSDP2, False), (FSDP2, True)):
        update, rollout = (memory_by_part(ONE, layout, processes, x) for x in (False, True))
        if serves:
            del rollout["copy to sample from"]
        kept = [model.parameters * sum(each.values()) / GIB for each in (update, rollout)]
        if max(kept) > limit:
            continue
        gpus = MACHINE if serves else 1
        sampling = WIDTH * position_seconds(H100, model, ROWS * gpus, context, gpus)
        computing = train_seconds(H100, model, TOKENS, context, 3)
        # In units of (N-1)/N 2P bytes. DDP: float32 gradients both ways, after the last
        # micro-batch, so that nothing hides them. ZeRO-2: 1 per micro-batch and 1. FSDP2: weights
        # twice and float32 gradients once, and 1 for the copy.
        batches = math.ceil(TOKENS / MICRO_BATCH)
        times = {DDP: 4, ZERO2: batches + 1, FSDP2: 4 * batches + 1}[layout]
        sent = times * (processes - 1) / processes * 2 * model.parameters
        # A ring is as fast as its slowest link.
        link = H100.link if processes <= MACHINE else min(H100.link, H100.network)
        hidden = 0.0 if layout is DDP else computing
        exposed = max(EXPOSED * sent / link, sent / link - hidden)
        how = layout.name if processes > 1 else "one process"
        numbers = (*kept, sampling, computing, exposed, sent / GIB)
        return [name, str(processes), f"{how}, servers" if serves else how, *map(short, numbers)]
    return []


TITAN = "https://github.com/pytorch/torchtitan/blob/"
TITAN_H100 = f"{TITAN}main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = f"{TITAN}041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines"
VLLM = "https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/"
VLLM_A100 = "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
QWEN = "https://qwen.readthedocs.io/zh-cn/latest/getting_started/speed_benchmark.html"
Q06, Q4, L8, L70 = (MODELS[n] for n in ("Qwen3-0.6B", "Qwen3-4B", "Llama-3-8B", "Llama-3-70B"))
# Tokens per second on each GPU: source, what, published, GPU, model, length of a row, passes.
TRAINED = (
    (TITAN_H100, "torchtitan, Llama-3-8B, 128 H100s", 5605, H100_HBM2E, L8, 8192, 3.5),
    (TITAN_A100, "torchtitan, Llama-3-8B, 64 A100s", 2904, A100, L8, 8192, 3.5),
    (TITAN_A100, "torchtitan, Llama-2-13B, 64 A100s", 2162, A100, LLAMA_2_13B, 4096, 3),
    (TITAN_A100, "torchtitan, Llama-3-70B, 64 A100s", 331, A100, L70, 8192, 4),
    (PRIME, "prime-rl, SFT, Qwen3-0.6B, one H100", 26005, H100, Q06, 8192, 4),
    (PRIME, "prime-rl, SFT, Qwen3-4B, 8 H100s", 6215, H100, Q4, 16384, 4),
    (PRIME, "prime-rl, RL without rollouts, Qwen3-4B, 8 H100s", 3253, H100, Q4, 16384, 4),
)
# Milliseconds of a sampled position: source, what, published, GPU, model, rows, tokens cached.
SAMPLED = (
    (VLLM, "vLLM, Llama-3-8B, one H100, 1 row", 6.48, H100, L8, 1, 192),
    (VLLM, "vLLM, Llama-3-8B, one H100, 4 rows", 6.59, H100, L8, 4, 192),
    (VLLM_A100, "vLLM, Llama-3-8B, A100 of 40 GB, 1 row", 13.33, A100_40GB, L8, 1, 1088),
    (QWEN, "SGLang, Qwen3-0.6B, one H20, 1 row", 2.414, H20, Q06, 1, 1024),
)


def errors() -> str:
    """Return the table of published throughputs, and by which factor the formulas are off."""
    rows, off = [], []
    for kind, points in (("tokens/s", TRAINED), ("ms", SAMPLED)):
        for source, what, real, gpu, model, a, b in points:
            if kind == "tokens/s":
                paper = 1 / train_seconds(gpu, model, 1, a / 2, b)
            else:
                paper = 1e3 * position_seconds(gpu, model, a, b)
            off.append(max(real / paper, paper / real))
            numbers = [f"{real:g}", f"{paper:.3g}", f"{off[-1]:.2f}"]
            rows.append([f"[{what}]({source})", kind, *numbers])
    rows.append(["median, worst", "", "", "", f"{median(off):.2f}, {max(off):.2f}"])
    return table(["", "", "published", "on paper", "off by"], rows)


def short(x: float) -> str:
    """Format a number with two digits, or all those before the point."""
    return f"{x:.0f}" if x >= 9.95 or x == 0 else f"{x:#.2g}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


# By the name of the place in the page.
TABLES = {"steps": steps, "published": errors}
