"""`rlhf-pg plan`: estimate the memory of a recipe before anything is loaded."""

import os
from collections.abc import Sequence

import torch
from rich.console import Console

from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import config_of, split_recipe
from rlhf_pg.plan.memory import verdict


def plan(flags: Sequence[str]) -> None:
    """Show a recipe's memory on each process, and whether it fits; no weights are loaded."""
    recipes, flags = split_recipe(flags)
    options, keys = parser_of("plan").parse_known_args(flags)
    args = config_of(recipes, keys, "plan")
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = "cuda"
    name, room = options.device or (None, 0.0)
    if name is None and here.type == "cuda":
        name = torch.cuda.get_device_name(here)
        room = float(torch.cuda.mem_get_info(here)[1])
    elif name is None:
        kind = "cpu"
        name = "CPU"
        room = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    console = Console()
    hardware = (here, kind, room, name)
    with console.status("measuring an update on tensors without data: some seconds each"):
        for said in verdict(args, options.sharding, options.num_processes, *hardware):
            console.print(said)
