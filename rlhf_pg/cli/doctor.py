"""`rlhf-pg doctor` says what is here, what is missing and how to get it, without the network."""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlhf_pg
from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.cli.options import parser_of

NAME = "rlhf-pg"
FOR_DEVELOPMENT = ("dev", "trl")
# Programs, what they are for, and how to get them.
PROGRAMS = {
    "bwrap": ("running code of a model in a sandbox", "apt install bubblewrap"),
    "g++": ("torch.compile, and DeepSpeed's offloading", "apt install g++"),
}
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_CONFIG_FILE"),
)
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
    options = parser_of("doctor").parse_args(list(flags))
    findings = [
        Finding("python", platform.python_version()),
        Finding(NAME, rlhf_pg.__version__),
        *packages(),
        *devices(),
        *surroundings(),
    ]
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        show(findings)
    if any(finding.is_needed and not finding.is_well for finding in findings):
        raise SystemExit(1)


def packages() -> Iterator[Finding]:
    """Compare what this package requires, by itself and for each extra, with what is installed."""
    try:
        required = [Requirement(text) for text in metadata.requires(NAME) or ()]
        extras = metadata.metadata(NAME).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        yield Finding("requirements", "unknown", False, f"pip install {NAME}")
        return
    yield from (_package(one, None) for one in required if _applies(one, ""))
    for extra in sorted(set(extras) - set(FOR_DEVELOPMENT)):
        of_extra = (one for one in required if _applies(one, extra) and not _applies(one, ""))
        yield from (_package(one, extra) for one in of_extra if one.name != NAME)


def _applies(required: Requirement, extra: str) -> bool:
    return required.marker is None or required.marker.evaluate({"extra": extra})


def _package(required: Requirement, extra: str | None) -> Finding:
    name = required.name if extra is None else f"{required.name} [{extra}]"
    command = f'pip install "{required.name}{required.specifier}"'
    if extra is not None:
        command = f'pip install "{NAME}[{extra}]"'
    try:
        version = metadata.version(required.name)
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", False, command, is_needed=extra is None)
    fits = required.specifier.contains(version, prereleases=True)
    return Finding(name, version, fits, "" if fits else command, is_needed=extra is None)


def devices() -> Iterator[Finding]:
    """Describe the GPUs, or say why there are none, and the CPUs and their memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("CPUs", f"{cpus}, {memory / 1e9:.0f} GB of memory")
    try:
        import torch
    except Exception as error:  # a library of CUDA that is not there, for example
        remedy = "pip install --force-reinstall torch"
        yield Finding("import torch", told(error), False, remedy, is_needed=True)
        return
    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        why = "the driver's nvidia-smi is here, but torch sees none" if has_driver else "none"
        built = torch.version.cuda or "no CUDA"
        remedy = f"install a torch that suits the driver (this one has {built}): pytorch.org"
        yield Finding("GPU", why, not has_driver, remedy if has_driver else "")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        has_bfloat16 = torch.cuda.get_device_capability(index) >= (8, 0)
        said = f"{torch.cuda.get_device_name(index)}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        remedy = "" if has_bfloat16 else "it has no bfloat16: train in float32 (dtype: float32)"
        yield Finding(f"GPU {index}", said, has_bfloat16, remedy)


def surroundings() -> Iterator[Finding]:
    """Describe programs that some features call, the working directory and the environment."""
    for name, (purpose, remedy) in PROGRAMS.items():
        path = shutil.which(name)
        found = f"not installed ({purpose})" if path is None else path
        yield Finding(name, found, path is not None, "" if path else remedy)
    where = Path.cwd()
    free = shutil.disk_usage(where).free
    writable = os.access(where, os.W_OK)
    said = f"{free / 1e9:.0f} GB free" if writable else "cannot be written to"
    remedy = "free some space, or set output_dir" if writable else "set output_dir elsewhere"
    well = writable and free >= LEAST_DISK
    yield Finding("working directory", said, well, "" if well else remedy)
    for name in VARIABLES:
        if name in os.environ:
            yield Finding(name, quoted(os.environ[name]))


def show(findings: Sequence[Finding]) -> None:
    """Print a table, and below it the commands that mend what is not well."""
    table = Table("", "found", "to get it")
    for one in findings:
        style = "" if one.is_well else "bold red" if one.is_needed else "yellow"
        table.add_row(Text(one.name), Text(one.found), Text(one.remedy), style=style)
    console = Console()
    console.print(table)
    broken = [one.name for one in findings if one.is_needed and not one.is_well]
    if broken:
        console.print(Text(f"nothing works without: {', '.join(broken)}", style="bold red"))
