"""`rlhf-pg doctor`: check the installation offline, and say how to get missing parts."""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlhf_pg
from rlhf_pg.boundary.quoted import tell
from rlhf_pg.cli.options import parser_of

NAME = "rlhf-pg"


class Finding(NamedTuple):
    """The state of one component, and a remedy if it is not in order."""

    name: str
    found: str
    is_well: bool = True
    remedy: str = ""
    is_needed: bool = False  # by every command


def doctor(flags: Sequence[str]) -> None:
    """Print all findings; exit with status 1 if a component that every command needs is missing."""
    options = parser_of("doctor").parse_args(flags)
    findings = [
        Finding("python", platform.python_version()),
        Finding(NAME, rlhf_pg.__version__),
        *packages(),
        *surroundings(),
    ]
    broken = [x.name for x in findings if x.is_needed and not x.is_well]
    table = Table("", "found", "to get it")
    for finding in findings:
        style = ""
        if not finding.is_well:
            style = "bold red" if finding.is_needed else "yellow"
        cells = map(Text, (finding.name, finding.found, finding.remedy))
        table.add_row(*cells, style=style)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        Console().print(table, *(f"nothing works without: {name}" for name in broken), sep="\n")
    if broken:
        raise SystemExit(1)


def packages() -> Iterator[Finding]:
    """Compare the requirements of this package and its extras with the installed packages."""
    try:
        extras = metadata.metadata(NAME).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # started in its source tree
        yield Finding("requirements", "unknown", False, f"pip install {NAME}")
        return
    for requirement in map(Requirement, metadata.requires(NAME) or ()):
        asking = (
            x
            for x in ("", *extras)
            if not requirement.marker or requirement.marker.evaluate({"extra": x})
        )
        extra = next(asking, "dev")  # "" if the package itself requires it
        if extra in ("dev", "trl") or requirement.name == NAME:  # for development
            continue
        name = f"{requirement.name} [{extra}]" if extra else requirement.name
        wanted = f"{NAME}[{extra}]" if extra else f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
            fits = requirement.specifier.contains(version, prereleases=True)
        except metadata.PackageNotFoundError:
            version = "not installed"
            fits = False
        yield Finding(name, version, fits, "" if fits else f'pip install "{wanted}"', not extra)


def surroundings() -> Iterator[Finding]:
    """Describe CPUs, GPUs, external programs and the disk."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("CPUs", f"{os.cpu_count()}, {memory / 1e9:.0f} GB of memory")
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index in range(count):
            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
            yield Finding(f"GPU {index}", f"{name}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
        if not count and shutil.which("nvidia-smi"):
            remedy = f"install a torch for the driver (this has {torch.version.cuda}): pytorch.org"
            yield Finding("GPU", "the driver is here, but torch sees none", False, remedy)
        elif not count:
            yield Finding("GPU", "none")
    except Exception as why:  # a missing CUDA library, for example
        yield Finding("import torch", tell(why), False, "pip install --force-reinstall torch", True)
    sandbox = "running a model's code in a sandbox"
    compiler = "torch.compile and offloading"
    for name, package, purpose in (("bwrap", "bubblewrap", sandbox), ("g++", "g++", compiler)):
        path = shutil.which(name)
        remedy = f"apt install {package}"
        yield Finding(name, path or f"missing ({purpose})", bool(path), "" if path else remedy)
    room = shutil.disk_usage(".").free / 1e9
    remedy = "" if room >= 10 else "free some space, or set output_dir"
    yield Finding("working directory", f"{room:.0f} GB free", not remedy, remedy)
