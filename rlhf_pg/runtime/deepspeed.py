"""The DeepSpeed backend: ZeRO-1, 2 and 3, with or without offloading to the CPU.

The verbs are those of `DDPBackend`, which documents them.

The engine's backward and step are called here, not by accelerate, which steps inside backward. The
recipe, not DeepSpeed's config, decides on precision, clipping and accumulation.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from rlhf_pg.models.recurrent import mix_in_one_call
from rlhf_pg.models.streaming import stored_value
from rlhf_pg.runtime.ddp import (
    COUNTER,
    MASTER,
    DDPBackend,
    State,
    check_divisible,
    count,
    put_in_place,
)
from rlhf_pg.runtime.termination import waits

Config = dict[str, Any]


class DeepSpeedBackend(DDPBackend):
    """Shards the moments, from ZeRO-2 on also the gradient, and in ZeRO-3 also the weights."""

    def _wrap(self) -> Any:
        check_divisible(self.module, self.optimizer)
        dtypes = {p.dtype for p in self.module.parameters()}
        self._bf16 = torch.bfloat16 in dtypes
        if torch.float64 in dtypes:
            raise ValueError("DeepSpeed does not train in float64: set dtype to float32")
        config = _config(self._accelerator, self._bf16)
        config["gradient_clipping"] = self.max_grad_norm
        config["zero_allow_untested_optimizer"] = True
        where = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        forced = config.get("zero_force_ds_cpu_optimizer", True)
        optimizer = self.optimizer
        if where != "none" and forced and type(optimizer) in (Adam, AdamW):  # others are refused
            optimizer = map_pytorch_optim_to_deepspeed(optimizer)
        _read(self.module, config, self._accelerator.device)
        engine, *_ = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)
        self._zero: Any = engine.optimizer
        self._three = engine.zero_optimization_stage() == 3
        if self._three:
            mix_in_one_call(self.module)
        self.optimizer = self._zero.optimizer
        self._forgotten: list[Tensor] = []  # shards that the next step leaves unchanged
        self._buffers: list[Tensor | None] = []  # for their gradients
        self._is_broken = False  # an update was interrupted
        self.optimizer.register_step_pre_hook(self._hide)
        self.optimizer.register_step_post_hook(self._show)
        return engine

    @staticmethod
    def place(accelerator: Accelerator, module: nn.Module) -> nn.Module:
        """Shard a module that is not trained under ZeRO-3; otherwise move it to the device."""
        if accelerator.state.deepspeed_plugin.zero_stage < 3:
            return module.to(accelerator.device)
        bf16 = any(p.dtype == torch.bfloat16 for p in module.parameters())
        config = _config(accelerator, bf16)
        _read(module, config, accelerator.device)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        mix_in_one_call(module)
        # The engine's hooks gather the weights. Not a child, since it would contain its parent.
        object.__setattr__(module, "engine", engine)
        return module

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._wrapped.set_gradient_accumulation_boundary(last)
        yield

    @waits
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share; ValueError after `discard_update`."""
        if self._is_broken:
            raise ValueError(
                "an update was interrupted, and DeepSpeed keeps half of its gradient: resume from "
                "a checkpoint in a new process"
            )
        self._wrapped.backward(loss * self._world)  # DeepSpeed averages

    def discard_update(self) -> None:
        """Mark the backend as broken, since DeepSpeed's buffers cannot drop half a gradient."""
        self._is_broken = True

    def zero_grad_of(self, module: nn.Module) -> None:
        dropped = {id(p) for p in module.parameters()}
        norms = getattr(self._zero, "norm_for_param_grads", {})
        for i, (parameters, piece) in enumerate(self._groups()):
            if id(parameters[0]) not in dropped:
                continue
            self._forgotten.append(piece)
            # The norm is computed from these; with offloading it is stored per parameter.
            for gradient in self._zero.averaged_gradients.get(i) or ():
                gradient.zero_()
            for key in map(self._zero.get_param_id, parameters):
                if key in norms:
                    norms[key] = torch.zeros_like(norms[key])  # multiplying by 0 would keep NaN

    @waits
    def step(self) -> float:
        self._wrapped.step()
        self._forgotten.clear()
        if not self._wrapped.was_step_applied():
            return torch.inf
        return float(self._wrapped.get_global_grad_norm())

    def _hide(self, *_: Any) -> None:
        """Hide gradients from `torch.optim`, which skips parameters without one."""
        self._buffers = [piece.grad for piece in self._forgotten]
        for piece in self._forgotten:
            piece.grad = None

    def _show(self, *_: Any) -> None:
        for piece, buffer in zip(self._forgotten, self._buffers, strict=True):
            piece.grad = buffer

    def updated(self) -> Iterable[Tensor]:
        return (piece for _, piece in self._groups())

    def state(self) -> Iterator[State]:
        for parameters, piece in self._groups():
            values = self.optimizer.state.get(piece, {})
            for parameter in parameters:
                _link(parameter, piece, values)
                for key, value in values.items():
                    if key == COUNTER:
                        yield parameter, key, torch.tensor(float(value))
                    else:
                        yield parameter, key, safe_get_full_optimizer_state(parameter, key)
                if self._bf16:
                    yield parameter, MASTER, safe_get_full_fp32_param(parameter)

    def load_state(self, state: Iterable[State]) -> None:
        self._zero.refresh_fp32_params()
        self.optimizer.state.clear()
        piece_of = {id(p): piece for parameters, piece in self._groups() for p in parameters}
        for parameter, key, value in state:
            piece = piece_of[id(parameter)]
            values: dict[str, Any] = self.optimizer.state[piece]
            if key == MASTER and self._bf16:
                self._set(parameter, None, value)
            elif key == COUNTER:
                if isinstance(self.optimizer, DeepSpeedCPUAdam):  # its counter is an integer
                    values[key] = int(value)
                else:
                    values[key] = count(self.optimizer, piece, value)
            elif key != MASTER:
                values.setdefault(key, torch.zeros_like(piece))
                _link(parameter, piece, values)
                self._set(parameter, key, value)

    def _set(self, parameter: Any, key: str | None, value: Tensor) -> None:
        """Set this process's shard of the float32 weights (key None) or of a moment."""
        if not self._three:
            parameter.set_full_hp_param(value, key)
            return
        size = parameter.ds_tensor.numel()  # equal on all processes: the last shards are padded
        flat = nn.functional.pad(value.flatten(), (0, size * self._world - value.numel()))
        shard = flat.narrow(0, self._accelerator.process_index * size, size)
        self._zero.set_local_hp_param(shard, parameter, key)

    def _groups(self) -> Iterable[tuple[list[Any], Tensor]]:
        """Return groups of parameters, each with this process's flat shard."""
        zero = self._zero
        if self._three:
            return zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        return zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)


def _read(module: nn.Module, config: Config, device: torch.device) -> None:
    """Shard a module with weights on the meta device, each as it is read from its file."""

    class Weights(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            for name, parameter in module.named_parameters():
                if hasattr(parameter, "ds_id"):  # shared with a module that is sharded already
                    continue
                if parameter.is_meta:
                    put_in_place(parameter, stored_value(module, name))
                elif config["bf16"]["enabled"]:
                    parameter.data = parameter.bfloat16()
                yield parameter

    if any(p.is_meta for p in module.parameters()):
        deepspeed.zero.Init(module=Weights(), config_dict_or_path=config)
        for buffer in module.buffers():
            buffer.data = buffer.to(device)


def _link(parameter: Any, piece: Tensor, values: dict[str, Any]) -> None:
    """Link a parameter of ZeRO-1 or 2 to its moments.

    DeepSpeed (0.19) does so only for the first parameter group.
    """
    if getattr(parameter, "_hp_mapping", None) is not None:  # a piece of it is on this process
        parameter._hp_mapping.set_optim_state_fragment(piece, values)


def _config(accelerator: Accelerator, bf16: bool) -> Config:
    """Return the launcher's DeepSpeed config without the keys that the recipe decides."""
    plugin = accelerator.state.deepspeed_plugin
    config = _drop_auto(plugin.deepspeed_config)
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise ValueError(
                f"the DeepSpeed config has a section {key!r}, which the recipe decides: leave it "
                "out (learning_rate, weight_decay, lr_scheduler_type ...)"
            )
    if plugin.zero_stage == 0:
        raise ValueError("DeepSpeed without ZeRO (stage 0) is plain DDP: launch with DDP")
    return config | {
        "train_micro_batch_size_per_gpu": 1,  # has no effect
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": False},
        # A non-finite gradient makes the norm non-finite, which all processes share.
        "bf16": {"enabled": bf16, "check_grad_overflow": bf16},
    }


def _drop_auto(config: Config) -> Config:
    """Drop the values "auto", which stand for DeepSpeed's defaults, and the batch size."""
    return {
        key: _drop_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto" and key != "train_batch_size"
    }
