"""`rlhf-pg doctor` says what is here, what is missing and how to get it, without the network."""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlhf_pg
from rlhf_pg.boundary.quoted import told
from rlhf_pg.cli.options import parser_of

NAME = "rlhf-pg"
FOR_DEVELOPMENT = ("dev", "trl")
# Programs, what they are for, and how to get them.
PROGRAMS = {
    "bwrap": ("running code of a model in a sandbox", "apt install bubblewrap"),
    "g++": ("torch.compile, and DeepSpeed's offloading", "apt install g++"),
}
LEAST_DISK = 10e9  # bytes; checkpoints of small models


class Finding(NamedTuple):
    """The state of one thing: what it is, whether it is well, and what to do if not."""

    name: str
    found: str
    is_well: bool = True
    remedy: str = ""
    is_needed: bool = False  # nothing works without it


def doctor(flags: Sequence[str]) -> None:
    """Print what is here and what is missing; exit with status 1 if nothing works without it."""
    options = parser_of("doctor").parse_args(flags)
    here = [Finding("python", platform.python_version()), Finding(NAME, rlhf_pg.__version__)]
    findings = [*here, *packages(), *surroundings()]
    broken = [one.name for one in findings if one.is_needed and not one.is_well]
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        table = Table("", "found", "to get it")
        for one in findings:
            style = "" if one.is_well else "bold red" if one.is_needed else "yellow"
            table.add_row(Text(one.name), Text(one.found), Text(one.remedy), style=style)
        Console().print(table)
        if broken:
            print(f"nothing works without: {', '.join(broken)}")
    if broken:
        raise SystemExit(1)


def packages() -> Iterator[Finding]:
    """Compare what this package requires, by itself and for each extra, with what is installed."""
    try:
        extras = metadata.metadata(NAME).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # started in its source tree
        yield Finding("requirements", "unknown", False, f"pip install {NAME}")
        return
    for one in map(Requirement, metadata.requires(NAME) or ()):
        asking = (x for x in ("", *extras) if not one.marker or one.marker.evaluate({"extra": x}))
        extra = next(asking, None)  # "" if the package itself asks for it
        if extra is None or extra in FOR_DEVELOPMENT or one.name == NAME:
            continue
        name = f"{one.name} [{extra}]" if extra else one.name
        wanted = f"{NAME}[{extra}]" if extra else f"{one.name}{one.specifier}"
        try:
            version = metadata.version(one.name)
            fits = one.specifier.contains(version, prereleases=True)
        except metadata.PackageNotFoundError:
            version, fits = "not installed", False
        yield Finding(name, version, fits, "" if fits else f'pip install "{wanted}"', not extra)


def surroundings() -> Iterator[Finding]:
    """Describe CPUs and GPUs, the programs that some features call, and the disk."""
    ours = hasattr(os, "sched_getaffinity")  # macOS has none
    count = len(os.sched_getaffinity(0)) if ours else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("CPUs", f"{count}, {memory / 1e9:.0f} GB of memory")
    try:
        import torch
    except Exception as error:  # a library of CUDA that is not there, for example
        remedy = "pip install --force-reinstall torch"
        yield Finding("import torch", told(error), False, remedy, is_needed=True)
    else:
        yield from gpus(torch)
    for name, (purpose, remedy) in PROGRAMS.items():
        path = shutil.which(name)
        yield Finding(name, path or f"missing ({purpose})", bool(path), "" if path else remedy)
    free = shutil.disk_usage(".").free
    remedy = "" if free >= LEAST_DISK else "free some space, or set output_dir"
    yield Finding("working directory", f"{free / 1e9:.0f} GB free", not remedy, remedy)


def gpus(torch: Any) -> Iterator[Finding]:
    """Describe each GPU, or why there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        said = f"{torch.cuda.get_device_name(index)}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        yield Finding(f"GPU {index}", said)
    if not count and shutil.which("nvidia-smi"):
        remedy = f"install a torch for the driver (this has {torch.version.cuda}): pytorch.org"
        yield Finding("GPU", "the driver's nvidia-smi is here, but torch sees none", False, remedy)
    elif not count:
        yield Finding("GPU", "none")
