"""Compiles the extensions of the pretend device, once per torch version and source."""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SOURCES = {"pretend_cuda": "cuda.cpp", "pretend_nccl": "nccl.cpp"}
_BUILD = """
import sys
from torch.utils import cpp_extension
name, source, directory = sys.argv[1:]
flags = ["-O1", "-w", "-DUSE_C10D_GLOO"]
cpp_extension.load(name, [source], build_directory=directory, extra_cflags=flags, with_cuda=False)
"""


def load(name: str) -> ModuleType:
    """An extension, as a module; compiled first where it is not there."""
    path = compiled(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preload(name: str) -> None:
    """Load an extension before torch: its hooks have to be there when torch first looks for them.

    Raises:
        RuntimeError: torch has been imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the pretend device has to be there before torch is imported")
    path = compiled(name)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    for library in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / library), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def compiled(name: str) -> Path:
    """The library of an extension.

    Raises:
        RuntimeError: it cannot be compiled, with what the compiler says.
    """
    directory = _directory()
    path = directory / name / f"{name}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(name, path.parent)
    return path


def _compile(name: str, directory: Path) -> None:
    command = [sys.executable, "-c", _BUILD, name, str(HERE / SOURCES[name]), str(directory)]
    outside = {k: v for k, v in os.environ.items() if k != "PRETEND_CUDA"}
    outside["PATH"] = f"{Path(sys.executable).parent}:{outside.get('PATH', '')}"  # where ninja is
    done = subprocess.run(command, capture_output=True, text=True, env=outside)
    if done.returncode or not (directory / f"{name}.so").exists():
        raise RuntimeError(
            f"the pretend device does not compile with torch {version('torch')} (it needs g++ and "
            f"ninja):\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )


def _directory() -> Path:
    """Where what was compiled is kept; another torch or source has another."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cpp", ".h"})
    content = b"".join(path.read_bytes() for path in [*sources, Path(__file__)])
    key = hashlib.sha256(content + sys.version.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rlhf_pg" / f"pretend-{version('torch')}-{key}"


def main() -> None:
    """Compile everything, side by side."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        for path in pool.map(compiled, SOURCES):
            print(path)


if __name__ == "__main__":
    main()
