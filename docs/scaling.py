"""The numbers of docs/scaling.md: worked out from the assumptions below, none of them measured.

`python docs/scaling.py` prints the tables, and `make docs` puts them into the page. P is the number
of parameters, N the number of processes, b the bytes of a number in the recipe's `dtype`. GB are
10^9 bytes.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rlhf_pg.plan.sharding import SHARDINGS, Sharding, parts

GB = 1e9

# Of an H100 with 80 GB in a machine of eight, as its makers state them.
NVLINK = 450 * GB  # bytes per second in each direction, per GPU
CARD = 50 * GB  # one network card of 400 Gb/s, in each direction
BANDWIDTH = 3.35e12  # bytes per second that a GPU reads from its own memory
FLOPS = 0.4 * 989e12  # 40 % of the peak in bfloat16: an assumption
MACHINE = 8  # GPUs

# Of a GPU's memory, what is left to activations, logits and the cache of the rollout.
RESERVE = 0.25
# Bytes of a weight in NF4: half a byte, a float32 for every 64, and the layers that are left alone.
FOUR_BITS = 0.6
# `micro_batch_tokens`, as the recipes have it.
MICRO_BATCH = 16384
# Trained parameters of a LoRA of rank 16 on every linear layer, as a share of P.
ADAPTER = 0.005

DTYPES = {"float32": 4, "bfloat16": 2}
PROCESSES = (8, 64, 512)


class Model(NamedTuple):
    """What of a model's shape the numbers need."""

    name: str
    parameters: float
    layers: int
    key_width: int  # key-value heads times their width
    vocabulary: int


MODELS = (
    Model("7B", 7e9, 28, 4 * 128, 152_064),  # shaped as Qwen2.5-7B
    Model("70B", 70e9, 80, 8 * 128, 128_256),  # shaped as Llama 3 70B
)


DDP, _, ZERO2, ZERO3, _ = SHARDINGS


def update_bytes(layout: Sharding, b: int, processes: int) -> float:
    """Per parameter, while an update is made."""
    kept = parts(layout, b, processes)
    return sum(part.on_each(processes) for name, part in kept.items() if name != "copy")


def rollout_bytes(layout: Sharding, b: int, processes: int) -> float:
    """Per parameter, while the native engine samples."""
    kept = parts(layout, b, processes)
    return sum(part.on_each(processes) for part in kept.values() if part.stays)


def state() -> str:
    """Bytes per parameter on one process, by backend and dtype."""
    names = ("weights", "gradients", "buckets", "moments", "masters", "copy")
    head = ("", "dtype", "weights", "gradients", "DDP's buckets", "Adam's moments")
    rows = []
    for layout in SHARDINGS:
        for dtype, b in DTYPES.items():
            kept = parts(layout, b, MACHINE)
            rows.append([layout.name, dtype, *(str(kept[name]) for name in names)])
    return table([*head, "float32 masters", "copy to sample from"], rows)


def memory() -> str:
    """GB on one GPU, update / rollout, of a policy that trains in full."""
    columns = [f"{model.name}, {n} GPUs" for model in MODELS for n in PROCESSES]
    rows = []
    for layout in SHARDINGS:
        for dtype, b in DTYPES.items():
            cells = [_both(layout, b, n, model) for model in MODELS for n in PROCESSES]
            rows.append([layout.name, dtype, *cells])
    return table(["", "dtype", *columns], rows)


def _both(layout: Sharding, b: int, processes: int, model: Model) -> str:
    sizes = (f(layout, b, processes) * model.parameters for f in (update_bytes, rollout_bytes))
    return " / ".join(short(size / GB) for size in sizes)


def extras() -> str:
    """GB of what comes beside the policy, in bfloat16."""
    everything: dict[str, Callable[[Model], float]] = {
        "reference, a replica (DDP, ZeRO-1, ZeRO-2)": lambda m: 2 * m.parameters,
        "reference, shared among 8 (ZeRO-3, FSDP2)": lambda m: 2 * m.parameters / 8,
        "LoRA under DDP: adapters, gradients, moments": adapter_bytes,
        "logits of a micro-batch of 16384 tokens": logits,
        "four of them": lambda m: 4 * logits(m),
        "four of them, `micro_batch_tokens: 4096`": lambda m: 4 * logits(m) * 4096 / MICRO_BATCH,
        "keys and values of 64 rows of 1280 tokens": lambda m: 64 * 1280 * cache(m),
        "host memory while 8 processes load files in bfloat16": lambda m: 2 * m.parameters,
        "the same for each copy of these weights": lambda m: 8 * 2 * m.parameters,
    }
    rows = [[name, *(short(f(m) / GB) for m in MODELS)] for name, f in everything.items()]
    return table(["", *(model.name for model in MODELS)], rows)


def logits(model: Model) -> float:
    """Bytes of one array (B,T,V) of a whole micro-batch."""
    return MICRO_BATCH * model.vocabulary * 4


def cache(model: Model) -> float:
    """Bytes of keys and values per token, in bfloat16."""
    return 2 * model.layers * model.key_width * 2


def adapter_bytes(model: Model) -> float:
    """Of a LoRA under DDP, whose adapters are float32 whatever the dtype."""
    return ADAPTER * model.parameters * update_bytes(DDP, 4, MACHINE)


SIZES = (0.5e9, 1.5e9, 3e9, 8e9, 14e9, 32e9, 70e9)
COUNTS = (1, 2, 4, 8)

# The simplest first. All of them keep weights or masters in float32.
FULL = (("DDP, float32", DDP, 4), ("ZeRO-2", ZERO2, 2), ("ZeRO-3", ZERO3, 2))


def choice(memory: float) -> str:
    """The first layout that fits on GPUs of `memory` bytes, by size of model and what trains."""
    room = memory * (1 - RESERVE)
    rows = []
    for size in SIZES:
        kinds = {
            "full": [in_full(size, n, room) for n in COUNTS],
            "full, PPO": [in_full(size, n, room, critic=True) for n in COUNTS],
            "LoRA": [as_adapter(size, n, room) for n in COUNTS],
        }
        rows += [[f"{size / 1e9:g}B", kind, *cells] for kind, cells in kinds.items()]
    return table(["", "trains", "1 GPU", *(f"{n} GPUs" for n in COUNTS[1:])], rows)


def in_full(parameters: float, processes: int, room: float, critic: bool = False) -> str:
    """With a reference and a separate critic of the same size, or alone."""
    for name, layout, b in FULL:
        if parameters * peak(layout, b, processes, critic) <= room:
            return name if processes > 1 or layout is not DDP else "one process, float32"
    # Then the GPU has the copy to sample from, and a few layers at a time.
    return "ZeRO-3, offload" if parameters * 2 <= room else "-"


def peak(layout: Sharding, b: int, processes: int, critic: bool = False) -> float:
    """Bytes per parameter of the policy, the larger of update and rollout.

    The engine copies no critic.
    """
    update, rollout = (f(layout, b, processes) for f in (update_bytes, rollout_bytes))
    if not critic:
        return max(update, rollout)
    kept = parts(layout, b, processes)
    reference = kept["weights"].on_each(processes)
    return max(2 * update, 2 * rollout - kept["copy"].size) + reference


def as_adapter(parameters: float, processes: int, room: float) -> str:
    """LoRA on the policy, and on a critic: the frozen weights are there once."""
    name = "one process" if processes == 1 else "DDP"
    adapters = 2 * ADAPTER * update_bytes(DDP, 4, processes)
    if parameters * (2 + adapters) <= room:
        return name
    return f"{name}, 4 bits" if parameters * (FOUR_BITS + adapters) <= room else "-"


class Traffic(NamedTuple):
    """`times` (N-1)/N b P bytes, that every process sends and receives in a ring."""

    what: str
    when: str
    times: int


TRAFFIC = (
    Traffic("DDP: gradients, all-reduced", "update", 2),
    Traffic("ZeRO-1: gradients, reduced; weights, gathered", "update", 2),
    Traffic("ZeRO-2: gradients, reduced", "micro-batch that trains", 1),
    Traffic("ZeRO-2: weights, gathered", "update", 1),
    Traffic("ZeRO-3, FSDP2: weights, twice, and gradients", "micro-batch that trains", 3),
    Traffic("ZeRO-3, FSDP2: weights, gathered", "micro-batch that is scored, per model", 1),
    Traffic("ZeRO-3, FSDP2: weights, gathered into the engine's copy", "rollout", 1),
)
TRAINING, ROLLOUT = TRAFFIC[4], TRAFFIC[6]


def exchanges() -> str:
    """What is exchanged when, in units of (N-1)/N b P."""
    return table(["", "each", "times"], [[what, when, str(n)] for what, when, n in TRAFFIC])


def sent(times: int, model: Model, processes: int, b: int = 2) -> float:
    """Bytes by every process."""
    return times * (processes - 1) / processes * b * model.parameters


def seconds(size: float, processes: int, cards: int = MACHINE) -> float:
    """Of a ring in which every process sends `size` bytes: as fast as its slowest link.

    NCCL lays a ring through every card of a machine, so they share what leaves it.
    """
    return size / (NVLINK if processes <= MACHINE else min(NVLINK, cards * CARD))


def traffic() -> str:
    """GB by every process, and seconds, of 1, 2 and 3 times (N-1)/N b P in bfloat16."""
    rows = []
    for model in MODELS:
        for times in (1, 2, 3):
            sizes = [sent(times, model, n) for n in PROCESSES]
            near = short(seconds(sizes[0], 8))
            far = [short(seconds(sizes[-1], 512, cards)) for cards in (8, 1)]
            rows.append([model.name, str(times), *(short(s / GB) for s in sizes), near, *far])
    volumes = [f"GB, N = {n}" for n in PROCESSES]
    return table(["", "times", *volumes, "s, 8", "s, 512, 8 cards", "s, 512, 1 card"], rows)


def step() -> str:
    """A step of 512 prompts with 8 completions each, FSDP2 in bfloat16, 8 cards per machine."""
    rows = []
    for model in MODELS:
        for n in PROCESSES:
            rows.append([model.name, str(n), *map(short, step_seconds(model, n).values())])
    names = step_seconds(MODELS[0], 8)
    return table(["", "GPUs", *(f"{name}, s" for name in names)], rows)


def step_seconds(model: Model, processes: int) -> dict[str, float]:
    """Lower bounds of the parts of a step of GRPO with one update and no reference."""
    rows, prompt, width = 512 * 8 // processes, 256, 1024
    tokens = rows * (prompt + width)
    # Every position reads all weights, and the keys and values of every row so far.
    read = 2 * model.parameters + rows * (prompt + width / 2) * cache(model)
    micro_batches = math.ceil(tokens / MICRO_BATCH)
    exchange = seconds(sent(TRAINING.times, model, processes), processes)
    return {
        "gather": seconds(sent(ROLLOUT.times, model, processes), processes),
        "sampling": width * read / BANDWIDTH,
        "of that, weights": width * 2 * model.parameters / BANDWIDTH,
        "computing": 6 * model.parameters * tokens / FLOPS,
        "exchange": micro_batches * exchange,
    }


def balance() -> str:
    """Tokens per micro-batch and GPU at which ZeRO-3 and FSDP2 exchange as long as they compute.

    3 · 2P / link = 6P · tokens / flops: the model's size does not matter.
    """
    links = {
        "one machine": NVLINK,
        "several machines, 8 cards each": 8 * CARD,
        "several machines, 1 card each": CARD,
    }
    rows = [[name, f"{FLOPS / link:.0f}"] for name, link in links.items()]
    return table(["", "tokens"], rows)


def short(x: float) -> str:
    """Two digits, or all those before the point."""
    return f"{x:.0f}" if x >= 9.95 else f"{x:#.2g}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# By the name of the place in the page.
TABLES: dict[str, Callable[[], str]] = {
    "choice-80": lambda: choice(80 * GB),
    "choice-141": lambda: choice(141 * GB),
    "state": state,
    "memory": memory,
    "extras": extras,
    "exchanges": exchanges,
    "traffic": traffic,
    "balance": balance,
    "step": step,
}

if __name__ == "__main__":
    print("\n\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
