"""Whether a run fits into the memory of its processes, and changes that would make it fit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.plan.memory import Memory, MetaModels, build_meta_models, predict_memory
from rlhf_pg.trainers.token_budget import SHARDINGS

BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}
# Keys that save memory; tried in this order, each together with those before it.
SAVINGS: dict[str, Any] = {"micro_batch_tokens": "auto", "dtype": "bfloat16"}
SAVINGS |= {"gradient_checkpointing": True, "use_peft": True}
GIB = 2**30


def verdict(
    args: PolicyGradientConfig,
    sharding: str,
    processes: int,
    here: torch.device,
    kind: str,
    room: float,
) -> tuple[Table, str]:
    """Return the bytes by part, and whether they fit into `room` bytes on each process.

    Args:
        sharding: a key of `BY_FLAG`.
        here, kind: the device whose kernels are used, and the kind of the run's device.
    """

    def build(args: PolicyGradientConfig) -> MetaModels:
        return build_meta_models(args, here, kind, room if kind == "cuda" else None)

    def estimate(meta: MetaModels, sharding: str, processes: int) -> Memory:
        return predict_memory(meta, BY_FLAG[sharding], processes, room, kind)

    def remedies() -> Iterator[str]:
        """Yield flags with which the run would fit: other shardings first, then other keys."""
        for count in sorted({n for n in (processes, 8, 64) if n >= processes and n > 1}):
            for other in ("zero2", "zero3"):
                if estimate(meta, other, count).peak <= room:
                    yield f"--num_processes {count} --sharding {other}"
                    break
        changes: dict[str, Any] = {}
        for key, value in SAVINGS.items():
            if getattr(args, key) not in (value, "offload"):
                changes[key] = value
                cheaper = build(dataclasses.replace(args, **changes))
                if estimate(cheaper, sharding, processes).peak <= room:
                    yield " ".join(f"--{name} {value}" for name, value in changes.items())
                    break

    meta = build(args)
    memory = estimate(meta, sharding, processes)
    fits = memory.peak <= room
    text = (
        f"Prompts of {meta.prompt} and completions of {args.max_completion_length} tokens, the "
        f"longest allowed; micro_batch_tokens {memory.micro_batch_tokens}; {memory.rows} "
        "completions sampled at a time by the native engine.\n"
        f"It {'fits' if fits else 'does not fit'}: {_short(memory.peak / GIB)} of "
        f"{_short(room / GIB)} GiB."
    )
    if not fits:
        found = " or ".join(remedies()) or "nothing that was tried: take a smaller model"
        text += f" What would make it fit: {found}."
    return _table(memory), text


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
