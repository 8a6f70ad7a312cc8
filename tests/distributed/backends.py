"""DDP, FSDP2 and DeepSpeed on CPUs: what accelerate switches on for GPUs alone, switched on here.

Everything below that switch is real: gloo, `torch`'s FSDP2, DeepSpeed's engine.
"""

import os
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from rlhf_pg.runtime import processes

OFFLOAD = {"device": "cpu", "pin_memory": False}
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    # Small enough that weights really are split up.
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 200},
    "zero2_offload": {"stage": 2, "offload_optimizer": OFFLOAD},
    "zero3_offload": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
}


def environment(backend: str) -> dict[str, str]:
    """What a process has to find in its environment when it starts."""
    if backend == "ddp":
        return {"ACCELERATE_USE_CPU": "true"}
    if backend.startswith("fsdp2"):
        # Kept are the weights of a layer, from its forward pass to its backward pass.
        reshards = "false" if backend == "fsdp2_kept" else "true"
        return {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": reshards,
        }
    return {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}


def install(backend: str) -> None:
    """Make `Runtime` find this backend."""
    if backend.startswith("fsdp2"):
        processes.Accelerator = _fsdp2  # type: ignore[attr-defined]
    elif backend in ZERO:
        processes.Accelerator = lambda **options: _deepspeed(backend, **options)  # type: ignore


def _fsdp2(**options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin, **options)
    shared = AcceleratorState._shared_state
    shared["distributed_type"], shared["fsdp_plugin"] = DistributedType.FSDP, plugin
    return accelerator


def _deepspeed(backend: str, cpu: bool, **options: Any) -> Accelerator:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": ZERO[backend],
    }
    import deepspeed  # which takes seconds

    # Or else DeepSpeed compiles an exchange through shared memory, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not AcceleratorState._shared_state:
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(**options)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for state in (PartialState, AcceleratorState):
        state._shared_state |= {
            "num_processes": world,
            "process_index": rank,
            "local_process_index": rank,
            "backend": "gloo",
        }
    return accelerator
