"""`rlhf-pg plan` estimates memory and seconds of a recipe before anything is loaded."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_pg import plan as planning
from rlhf_pg.cli.help import usage_of
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import algorithm_of
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import parse
from rlhf_pg.plan.sharding import SHARDINGS

BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}


def plan(recipe: Path, flags: Sequence[str]) -> None:
    """Show what a recipe would take on each process; no weights are loaded."""
    options, keys = _plan_options(flags)
    config_type = TRAINERS[algorithm_of(recipe, TRAINERS)].config_type
    args = parse(config_type, ["--config", str(recipe), *keys], f"rlhf-pg train {recipe}")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    room, kind = _room(device), device.type
    if options.device is not None:
        room, kind = planning.DEVICES[options.device].memory, "cuda"
    if options.memory is not None:
        room, kind = options.memory * 1e9, "cuda"
    meta = planning.build_meta_models(args, device, kind, room if kind == "cuda" else None)
    layout = BY_FLAG[options.sharding]
    memory = planning.predicted_memory(meta, layout, options.gpus, room, kind)
    console = Console()
    console.print(_memory_table(memory))
    if options.device is not None:
        job = planning.job_of(meta, memory, layout, options.gpus)
        shape = planning.shape_of(meta.policy.model)
        gpu = planning.DEVICES[options.device]._replace(memory=room)
        console.print(planning.paper_table(gpu, shape, job, meta.critic is not None))
        console.print(Text(planning.said_beside(job)))
        return
    rates = planning.Rates(options.tflops * 1e12, options.bandwidth * 1e9)
    if not (options.tflops and options.bandwidth):
        here = planning.measured_rates(device, getattr(torch, args.dtype))
        rates = planning.Rates(rates.work or here.work, rates.bytes or here.bytes)
    console.print(_pace_table(planning.predicted_pace(meta, memory, options.gpus), rates))
    console.print(Text(_assumptions(meta, memory, rates)))


def _plan_options(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the plan's own options; return them, and the flags that are keys of the recipe."""
    parser = parser_of("plan", usage_of("plan"))
    options, keys = parser.parse_known_args(list(flags))
    if options.device and (options.tflops or options.bandwidth):
        parser.error("--device sets what --tflops and --bandwidth would: give it alone")
    return options, keys


def _room(device: torch.device) -> float:
    """Return the bytes of the device; for the CPU, all of its memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _memory_table(memory: planning.Memory) -> Table:
    totals = [sum(phase.values()) for phase in (memory.update, memory.rollout)]
    unit, name = (1e9, "GB") if max(totals) >= 1e9 else (1e6, "MB")
    table = Table(f"{name} on each process", "update", "rollout")
    for part in dict.fromkeys([*memory.update, *memory.rollout]):
        sizes = [phase.get(part, 0.0) for phase in (memory.update, memory.rollout)]
        if any(sizes):
            table.add_row(part, *(_short(size / unit) for size in sizes))
    table.add_row("total", *(_short(total / unit) for total in totals), style="bold")
    return table


def _pace_table(phases: dict[str, planning.Pace], rates: planning.Rates) -> Table:
    table = Table("a step", "TFLOP", "GB moved", "seconds", "share")
    whole = sum(pace.seconds(rates) for pace in phases.values())
    for phase, pace in phases.items():
        seconds = pace.seconds(rates)
        numbers = (pace.work / 1e12, pace.bytes / 1e9, seconds)
        table.add_row(phase, *map(_short, numbers), f"{100 * seconds / whole:.0f} %")
    table.add_row("total", "", "", _short(whole), "", style="bold")
    return table


def _assumptions(meta: planning.MetaModels, memory: planning.Memory, rates: planning.Rates) -> str:
    width = meta.args.max_completion_length
    return (
        f"prompts of {meta.prompt} and completions of {width} tokens, the longest allowed; "
        f"micro_batch_tokens {memory.micro_batch_tokens}; {memory.rows} completions sampled at a "
        f"time; {_short(rates.work / 1e12)} TFLOP/s, {_short(rates.bytes / 1e9)} GB/s. Rewards, "
        "and exchanges between processes, are not included."
    )


def _short(number: float) -> str:
    """Format a number with three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
