"""Whether a run fits into the memory of its processes, and changes that would make it fit."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.plan.memory import Memory, MetaModels, build_meta_models, predict_memory
from rlhf_pg.trainers.token_budget import SHARDINGS

BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}
# Keys that save memory, by what they cost; each is tried together with those before it.
SAVINGS: dict[str, Any] = {"micro_batch_tokens": "auto", "gradient_checkpointing": True}
SAVINGS |= {"dtype": "bfloat16", "use_peft": True}
GIB = 2**30


def verdict(
    args: PolicyGradientConfig,
    sharding: str,
    processes: int,
    here: torch.device,
    kind: str,
    room: float,
    name: str,
) -> Iterator[Table | Text]:
    """Yield the bytes by part, whether they fit into `room` bytes on each process, and flags with
    which they would: keys first, then more GPUs, and if need be both.

    Args:
        sharding: a key of `BY_FLAG`.
        here, kind: the device whose kernels are used, and the kind of the run's device.
        name: of the run's device, for a reader.
    """

    def build(**changes: Any) -> MetaModels:
        chosen = dataclasses.replace(args, **changes)
        return build_meta_models(chosen, here, kind, room if kind == "cuda" else None)

    def estimate(meta: MetaModels, sharding: str, processes: int) -> Memory:
        return predict_memory(meta, BY_FLAG[sharding], processes, room, kind)

    meta = build()
    memory = estimate(meta, sharding, processes)
    spare = (room - memory.peak) / GIB
    where = f"one {name}" if processes == 1 else f"{processes} x {name}"
    sizes = f"{_short(memory.peak / GIB)} of {_short(room / GIB)} GiB"
    yield _table(memory)
    yield Text(
        f"Prompts of {meta.prompt} and completions of {args.max_completion_length} tokens, the "
        f"longest allowed; micro_batch_tokens {memory.micro_batch_tokens}; {memory.rows} "
        "completions sampled at a time by the native engine."
    )
    if spare >= 0:
        yield Text(f"It fits on {where}, with {_short(spare)} GiB to spare: {sizes}.")
        return
    yield Text(
        f"It does not fit on {where}, by {_short(-spare)} GiB: {sizes}. What would make it fit:"
    )
    changes, tried, fits = dict[str, Any](), meta, False
    for key, value in SAVINGS.items():
        if not fits and getattr(args, key) not in (value, "offload"):
            with suppress(ValueError):  # the recipe has a key that forbids this one
                tried = build(**changes, **{key: value})
                changes[key] = value
                fits = estimate(tried, sharding, processes).peak <= room
    four = tried._replace(args=dataclasses.replace(tried.args, load_in_4bit=True))
    if not fits and sharding == "ddp" and estimate(four, sharding, processes).peak <= room:
        changes["load_in_4bit"] = fits = True
    if fits:
        yield _flags(changes)
    layouts = ("ddp",) if args.load_in_4bit else ("zero2", "zero3")  # 4-bit weights are not sharded
    for more, built in [({}, meta)] if fits else [({}, meta), (changes, tried)]:
        for count, layout in product((2, 4, 8, 16, 32, 64), layouts):
            if count >= processes and estimate(built, layout, count).peak <= room:
                yield _flags(more | {"num_processes": count, "sharding": layout})
                return
    if not fits:
        yield Text("  nothing that was tried: take a smaller model")


def _flags(keys: Mapping[str, Any]) -> Text:
    return Text("  " + " ".join(f"--{key} {value}" for key, value in keys.items()))


def _table(memory: Memory) -> Table:
    unit, name = (GIB, "GiB") if memory.peak >= GIB else (2**20, "MiB")
    table = Table(f"{name} on each process", "update", "rollout")
    phases = (memory.update, memory.rollout)
    for part in dict.fromkeys([*memory.update, *memory.rollout]):
        if any(sizes := [phase.get(part, 0.0) for phase in phases]):
            table.add_row(part, *(_short(size / unit) for size in sizes))
    table.add_row("total", *(_short(sum(x.values()) / unit) for x in phases), style="bold")
    return table


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
