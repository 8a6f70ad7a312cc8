"""What a launcher may ask for, and what it may not: one clear error."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType

from rlhf_pg.runtime.processes import _backend


def accelerator(kind: DistributedType, **state: Any) -> Any:
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(**state))


def deepspeed_with(stage: int, **config: Any) -> Any:
    plugin = SimpleNamespace(
        zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage}, **config}
    )
    return accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=plugin)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (accelerator(DistributedType.NO), "DDP"),
        (accelerator(DistributedType.MULTI_GPU), "DDP"),
        (deepspeed_with(2), "ZeRO-2"),
        (deepspeed_with(3), "ZeRO-3"),
    ],
)
def test_backend_names(asked, name) -> None:
    if name.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    assert _backend(asked)[0] == name


def test_fsdp2_disables_ram_efficient_loading(monkeypatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    assert _backend(accelerator(DistributedType.FSDP, fsdp_plugin=plugin))[0] == "FSDP2"
    assert not plugin.cpu_ram_efficient_loading
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].lower() == "false"  # what transformers asks


@pytest.mark.parametrize(
    "asked",
    [
        accelerator(DistributedType.MEGATRON_LM),
        accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=1)),
    ],
)
def test_unsupported_backend_raises(asked) -> None:
    with pytest.raises(ValueError, match="not supported: use DDP, FSDP with fsdp_version 2"):
        _backend(asked)


def test_recipe_overrides_deepspeed_config() -> None:
    zero = pytest.importorskip("rlhf_pg.runtime.deepspeed")
    asked = deepspeed_with(
        2,
        train_batch_size="auto",
        gradient_clipping="auto",
        gradient_accumulation_steps=8,
        fp16={"enabled": "auto"},
        bf16={"enabled": False},
        zero_hpz_partition_size=1,
    )
    sections = asked.state.deepspeed_plugin.deepspeed_config
    sections["zero_optimization"]["reduce_bucket_size"] = "auto"
    assert zero._config(asked, bf16=True) == {
        "zero_optimization": {"stage": 2},
        "zero_hpz_partition_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True, "check_grad_overflow": True},
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (deepspeed_with(2, optimizer={"type": "AdamW"}), "section 'optimizer'"),
        (deepspeed_with(2, scheduler={"type": "WarmupLR"}), "section 'scheduler'"),
        (deepspeed_with(0), "plain DDP"),
    ],
)
def test_unsuitable_deepspeed_config_raises(asked, message) -> None:
    zero = pytest.importorskip("rlhf_pg.runtime.deepspeed")
    with pytest.raises(ValueError, match=message):
        zero._config(asked, bf16=False)


def test_deepspeed_with_float64_raises() -> None:
    zero = pytest.importorskip("rlhf_pg.runtime.deepspeed")
    layer = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    asked = SimpleNamespace(num_processes=1)
    with pytest.raises(ValueError, match="set dtype to float32"):
        zero.DeepSpeedBackend(asked, layer, optimizer)


def test_deepspeed_after_discarded_update_raises() -> None:
    zero = pytest.importorskip("rlhf_pg.runtime.deepspeed")
    engine = object.__new__(zero.DeepSpeedBackend)
    engine.watch = None
    engine.discard_update()
    with pytest.raises(ValueError, match=r"an update was interrupted.*in a new process"):
        engine.backward(torch.zeros(()))
