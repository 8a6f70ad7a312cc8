"""`rlhf-pg doctor`: what is missing has its command, and only what is needed ends in status 1."""

import json
from importlib import metadata

import pytest
import torch

from rlhf_pg.cli import doctor as module, main
from rlhf_pg.cli.doctor import Finding

REQUIRED = ["torch>=2.0", "nothing-here>=1", "vllm>=99 ; extra == 'vllm'", "trl ; extra == 'dev'"]


@pytest.fixture
def required(monkeypatch):
    """Sets what the package says it requires."""

    def require(*requirements: str) -> None:
        monkeypatch.setattr(metadata, "requires", lambda name: list(requirements))

    return require


def test_healthy_environment_is_status_0(capsys) -> None:
    main(["doctor", "--json"])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["torch"]["found"] == metadata.version("torch")
    assert found["torch"]["is_well"]
    assert {"python", "CPUs", "working directory", "bwrap"} <= set(found)


def test_missing_requirement_is_status_1_with_command(required, capsys) -> None:
    required(*REQUIRED)
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == 1
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "nothing works without: nothing-here" in shown


def test_extra_is_named_and_not_needed(required) -> None:
    required(*REQUIRED)
    found = {one.name: one for one in module.packages()}
    assert found["nothing-here"].remedy == 'pip install "nothing-here>=1"'
    assert found["nothing-here"].is_needed
    extra = found["vllm [vllm]"]
    assert (extra.is_well, extra.is_needed) == (False, False)
    assert extra.remedy == 'pip install "rlhf-pg[vllm]"'
    assert "trl [dev]" not in found


def test_version_outside_range_is_broken(required) -> None:
    required("torch<1")
    (torch,) = module.packages()
    assert torch == Finding(
        "torch", metadata.version("torch"), False, 'pip install "torch<1"', True
    )


def test_driver_too_old_for_torch_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as NVML has it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    (gpu,) = (one for one in module.surroundings() if one.name.startswith("GPU"))
    assert (gpu.is_well, gpu.is_needed) == (False, False)
    assert "pytorch.org" in gpu.remedy
