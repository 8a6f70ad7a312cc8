"""One training state, saved and restored: weights, optimizer, schedule, random states, counters.

A checkpoint is a directory that `from_pretrained` reads, with three files beside the model (or its
adapter): `optimizer.safetensors` (by parameter name), `rng-rank{r}.safetensors` and `state.json`;
`critic/`, where there is one, and `reference/` where that moves. Nothing is pickled.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from rlhf_pg.models import load_weights
from rlhf_pg.runtime import Runtime, State, Trained, Whole

# Keys that a resumed run may change: how long, how often, where, and what never changes a result.
MAY_CHANGE = {
    *("output_dir", "resume_from_checkpoint", "model_name_or_path", "value_model_name_or_path"),
    *("max_steps", "num_train_epochs", "save_steps", "save_best", "save_merged", "eval_steps"),
    *("num_generations_eval", "eval_success_threshold"),
    *("log_completions_steps", "num_completions_to_print", "report_to", "run_name"),
    *("micro_batch_tokens", "rollout_cache_tokens", "gradient_checkpointing", "ddp_timeout"),
    "environment_timeout",
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_max_model_length"),
    *("vllm_server_base_url", "vllm_server_timeout", "vllm_sync_directory"),
}

# What has to be as it was when the run began, and where it comes from.
REMEDIES = {
    "model": "the same base model and peft_config",
    "reference": "the model that training started from, and with the same beta",
    "critic": "the same value_model",
}


@dataclass
class TrainState:
    """The counters of a run."""

    step: int = 0  # rollout batches trained on
    draws: int = 0  # prompts drawn so far: the data cursor, and the key of the next noise
    num_tokens: int = 0  # prompt and completion tokens so far
    best_reward: float | None = None  # highest eval_reward so far


@dataclass
class Checkpointer:
    """Saves and restores everything that a run needs to go on as if it had never stopped."""

    directory: Path
    parts: Mapping[str, Whole]  # "model", and if there are "critic" and "reference"
    tokenizer: PreTrainedTokenizerBase
    trained: Trained
    scheduler: LRScheduler
    state: TrainState
    config: dict[str, Any]
    fingerprints: Callable[[], Mapping[str, str | None]]  # of what never changes in a run, by part
    running: Mapping[str, Any] = field(default_factory=dict)  # records that move, by name

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name; those of the critic begin with "critic."."""
        model = self.parts["model"].pieces.named_parameters()
        if "critic" not in self.parts:
            return dict(model)
        return dict([*model, *self.parts["critic"].pieces.named_parameters(prefix="critic")])

    def path(self) -> Path:
        return self.directory / f"step-{self.state.step:08d}"

    def latest(self) -> Path | None:
        """The newest checkpoint, by number."""
        return max(self.directory.glob("step-" + "[0-9]" * 8), default=None)

    def save(self, runtime: Runtime, path: Path | None = None) -> Path:
        """Write a checkpoint, by default under its step; it gets its name when it is complete."""
        path = path or self.path()
        partial = path.with_name(f"partial-{path.name}")
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self.save_models(runtime, partial)
        runtime.wait()  # who is late, is missed here
        names = {p: name for name, p in self.parameters.items()}
        tensors = optimizer_tensors(self.trained, names, keep=runtime.is_main)
        if runtime.is_main:
            save_file(tensors, partial / "optimizer.safetensors")
            (partial / "state.json").write_text(json.dumps(self._record(), indent=2))
        runtime.wait()
        save_file(rng_tensors(), partial / f"rng-rank{runtime.rank}.safetensors")
        runtime.wait()
        if runtime.is_main:
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        runtime.wait()
        return path

    def save_models(self, runtime: Runtime, path: Path, final: bool = False) -> None:
        """Model (or its adapter), tokenizer and critic, as `from_pretrained` reads them.

        Args:
            final: without a reference that moves, which only a resumed run needs.
        """
        for name, whole in self.parts.items():
            part: Any = whole.module
            if name == "reference" and (final or not part.moves):
                continue
            with whole.filled(runtime.main_host, _saves_adapter(part)):
                if not runtime.is_main:
                    continue
                if name == "model":
                    part.save_pretrained(path)
                    self.tokenizer.save_pretrained(path)
                elif name == "critic":
                    part.save(path / name, self.running.get("value_moments"))
                else:
                    part.save(path / name)

    def _record(self) -> dict[str, Any]:
        """What is no tensor."""
        return {
            "counters": asdict(self.state),
            "running": {name: vars(record) for name, record in self.running.items()},
            "scheduler": self.scheduler.state_dict(),
            "learning_rates": [group["lr"] for group in self.trained.optimizer.param_groups],
            "fingerprints": self.fingerprints(),
            "config": self.config,
        }

    def resume(self, choice: str | bool | None, rank: int) -> dict[str, Any]:
        """Restore a checkpoint directory, or for True and "latest" the newest; nothing for None.

        Returns:
            The config that was saved there; empty for None.

        Raises:
            ValueError: there is none, or a new run would mix with the checkpoints of another.
        """
        latest = self.latest()
        if choice in (True, "latest"):
            if latest is None:
                raise ValueError(f"{self.directory.parent} has no checkpoint to resume from")
            return self.restore(latest, rank)
        if choice:
            path = Path(str(choice))
            saved = self.restore(path, rank)
            if latest is not None and int(latest.name.split("-")[1]) > self.state.step:
                raise ValueError(
                    f"{self.directory} holds checkpoints of later steps, up to {latest.name}: move "
                    "them away, resume from the latest, or choose another output_dir"
                )
            return saved
        if latest is not None and self.state.step == 0:
            raise ValueError(
                f"{self.directory.parent} holds the checkpoints of another run: resume it with "
                "resume_from_checkpoint latest, or choose another output_dir"
            )
        return {}

    def restore(self, path: Path, rank: int) -> dict[str, Any]:
        """Put a saved state back, in place; returns the config that was saved with it.

        Raises:
            ValueError: no checkpoint there, or model, reference or critic are not those of the
                saved run.
        """
        if not (path / "state.json").exists():
            raise ValueError(f"{path} holds no checkpoint: it has no state.json")
        state = json.loads((path / "state.json").read_text())
        self._check_config(path, state["config"])
        for name, remedy in REMEDIES.items():
            if state["fingerprints"][name] != self.fingerprints()[name]:
                raise ValueError(
                    f"{path} was saved by a run with another {name}: resume with {remedy}"
                )
        self._check_running(path, state["running"])
        self._load_models(path)
        self.trained.load_state(stored_state(path / "optimizer.safetensors", self.parameters))
        self.scheduler.load_state_dict(state["scheduler"])
        groups = self.trained.optimizer.param_groups
        for group, rate in zip(groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        vars(self.state).update(state["counters"])
        for name, record in self.running.items():
            vars(record).update(state["running"][name])
        if state["config"].get("output_dir") != self.config.get("output_dir"):
            self.state.best_reward = None  # the best checkpoint stayed there
        rng = path / f"rng-rank{rank}.safetensors"
        if rng.exists():
            restore_rng(load_file(rng))
        saved: dict[str, Any] = state["config"]
        return saved

    def _load_models(self, path: Path) -> None:
        """The inverse of `save_models`."""
        for name, whole in self.parts.items():
            part: Any = whole.module
            if name == "reference" and not part.moves:
                continue
            with whole.changed(_saves_adapter(part)):
                if name == "model":
                    load_weights(part, path)
                else:
                    part.restore(path / name)

    def _check_running(self, path: Path, saved: Mapping[str, Any]) -> None:
        """What moves with a run has the name of its reward function, for one."""
        theirs, ours = (", ".join(sorted(names)) or "nothing" for names in (saved, self.running))
        if theirs != ours:
            raise ValueError(
                f"{path} was saved by a run that keeps {theirs}, and this one keeps {ours}: resume "
                "with the same reward functions"
            )

    def _check_config(self, path: Path, saved: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.config))
        changed = [
            f"{key} was {saved[key]!r} and is {now[key]!r}"
            for key in saved.keys() & now.keys() - MAY_CHANGE
            if saved[key] != now[key]
        ]
        if changed:
            raise ValueError(
                f"{path} was saved by a run with another config: {'; '.join(sorted(changed))}. "
                "Resume with the same, or start a new run from its weights"
            )


def optimizer_tensors(
    trained: Trained, names: Mapping[Tensor, str], keep: bool = True
) -> dict[str, Tensor]:
    """Optimizer state as `{parameter name}.{key}` -> tensor, on the CPU.

    Args:
        keep: otherwise this process only helps another to gather it.
    """
    return {
        f"{names[parameter]}.{key}": value.cpu().contiguous()
        for parameter, key, value in trained.state()
        if keep
    }


def stored_state(path: Path, parameters: Mapping[str, Tensor]) -> Iterator[State]:
    """What `optimizer_tensors` gave and `save_file` saved, tensor by tensor."""
    with safe_open(path, framework="pt") as file:
        for full_name in file.keys():  # noqa: SIM118 (it is no dict)
            name, key = full_name.rsplit(".", 1)
            yield parameters[name], key, file.get_tensor(full_name)


def _saves_adapter(module: nn.Module) -> bool:
    """Whether what is saved of it is what is trained."""
    return any(isinstance(part, PeftModel) and _trains(part) for part in module.modules())


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def rng_tensors() -> dict[str, Tensor]:
    """The states of every generator of this process, as tensors."""
    version, numbers, gauss = random.getstate()
    twister: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = twister
    assert version == 3
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor([torch.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Any]) -> None:
    """The inverse of `rng_tensors`."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    numbers = tuple(states["python"].tolist())
    random.setstate((3, numbers, None if gauss != gauss else gauss))
    position, has_gauss, cached = states["numpy_rest"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
