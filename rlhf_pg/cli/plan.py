"""`rlhf-pg plan` estimates the memory of a recipe before anything is loaded."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import config_of, find_recipe, split_recipe
from rlhf_pg.plan.memory import Memory, MetaModels, build_meta_models, predicted_memory
from rlhf_pg.trainers.token_budget import SHARDINGS

BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}
# Keys that save memory, in the order in which they are tried, each together with those before it.
SAVINGS: dict[str, Any] = {"micro_batch_tokens": "auto", "dtype": "bfloat16"}
SAVINGS |= {"gradient_checkpointing": True, "use_peft": True}
GIB = 2**30


def plan(flags: Sequence[str]) -> None:
    """Show what a recipe would take on each process, and whether it fits; no weights are loaded."""
    name, flags = split_recipe(flags)
    options, keys = parser_of("plan").parse_known_args(flags)
    args = config_of(find_recipe(name), keys, "plan")
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room, kind = options.device, "cuda" if options.device else here.type
    if room is None and kind == "cuda":
        room = float(torch.cuda.mem_get_info(here)[1])
    elif room is None:
        room = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def build(args: Any) -> MetaModels:
        return build_meta_models(args, here, kind, room if kind == "cuda" else None)

    def estimate(meta: MetaModels, sharding: str, processes: int) -> Memory:
        return predicted_memory(meta, BY_FLAG[sharding], processes, room, kind)

    def remedies() -> Iterator[str]:
        """Yield the flags with which it would fit: other shardings first, then other keys."""
        counts = sorted({options.num_processes, 8, 64})
        for count in (n for n in counts if n >= options.num_processes and n > 1):
            for sharding in ("zero2", "zero3"):
                if estimate(meta, sharding, count).peak <= room:
                    yield f"--num_processes {count} --sharding {sharding}"
                    break
        changes: dict[str, Any] = {}
        for key, value in SAVINGS.items():
            if getattr(args, key) not in (value, "offload"):
                changes[key] = value
                cheaper = build(dataclasses.replace(args, **changes))
                if estimate(cheaper, options.sharding, options.num_processes).peak <= room:
                    yield " ".join(f"--{name} {value}" for name, value in changes.items())
                    break

    meta = build(args)
    memory = estimate(meta, options.sharding, options.num_processes)
    verdict = "fits" if memory.peak <= room else "does not fit"
    text = (
        f"Prompts of {meta.prompt} and completions of {args.max_completion_length} tokens, the "
        f"longest allowed; micro_batch_tokens {memory.micro_batch_tokens}; {memory.rows} "
        "completions sampled at a time by the native engine.\n"
        f"It {verdict}: {_short(memory.peak / GIB)} of {_short(room / GIB)} GiB."
    )
    if memory.peak > room:
        found = " or ".join(remedies()) or "nothing that was tried: take a smaller model"
        text += f" What would make it fit: {found}."
    Console().print(_table(memory), Text(text), sep="\n")


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
