"""Save and restore a training state: weights, optimizer, schedule, random states, counters.

A checkpoint is a directory that `from_pretrained` reads, with three files beside the model (or its
adapter): `optimizer.safetensors` (by parameter name), `rng-rank{r}.safetensors` and `state.json`;
`critic/`, where there is one, and `reference/` where that moves. Nothing is pickled. `state.json`
has the size and hash of every file: a run never resumes from a damaged checkpoint.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedTokenizerBase

from rlhf_pg.checkpoint import atomic, compatibility
from rlhf_pg.failpoints import failpoint
from rlhf_pg.models import load_weights, merged
from rlhf_pg.rng import restore_rng, rng_tensors
from rlhf_pg.runtime import DDPBackend, FullWeights, Runtime, State

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """The counters of a run."""

    step: int = 0  # rollout batches trained on
    prompt_index: int = 0  # the next prompt's: the data cursor, and the key of its noise
    num_tokens: int = 0  # prompt and completion tokens so far
    best_reward: float | None = None  # highest eval_reward so far
    skipped_in_a_row: int = 0  # latest steps in which every update was skipped


@dataclass
class Checkpointer:
    """Save and restore everything that a run needs to go on as if it had never stopped."""

    directory: Path
    parts: Mapping[str, FullWeights]  # "model"; "critic" and "reference", if they exist
    tokenizer: PreTrainedTokenizerBase
    trained: DDPBackend
    scheduler: LRScheduler
    state: TrainState
    config: dict[str, Any]
    fingerprints: Callable[[], Mapping[str, str | None]]  # by part; they never change in a run
    running: Mapping[str, Any] = field(default_factory=dict)  # records that change, by name
    limit: int | None = None  # number of checkpoints to keep; None keeps all
    found: Collection[str] = ()  # keys set to auto, whose values a resumed run takes over
    saved: int | None = None  # the last step that this process saved

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name; names of the critic's begin with "critic."."""
        found: dict[str, Tensor] = dict(self.parts["model"].pieces.named_parameters())
        if "critic" in self.parts:
            found |= self.parts["critic"].pieces.named_parameters(prefix="critic")
        return found

    def path(self, step: int | None = None) -> Path:
        """Return the place of the checkpoint of a step, by default of the one just made."""
        return self.directory / f"step-{self.state.step if step is None else step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, whole or not, in order."""
        found = self.directory.glob("step-" + "[0-9]" * 8)
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def save(self, runtime: Runtime, path: Path | None = None, prunes: bool = True) -> Path:
        """Write a checkpoint, by default under its step; it gets its name when it is complete.

        Unless it `prunes`, the next save removes older checkpoints beyond `limit`.

        Raises:
            OSError: on all processes, it could not be written. Nothing of it remains, and what was
                there before is unchanged; if only its name could not be synced, all of it remains.
        """
        path, run = path or self.path(), self.directory.parent
        save, partial = atomic.Save(runtime, path), atomic.partial_of(path)
        save.main(lambda: run.mkdir(mode=0o700, parents=True, exist_ok=True))
        save.main(lambda: atomic.begin(path))
        self.save_models(save, partial)
        names = {p: name for name, p in self.parameters.items()}
        tensors = optimizer_tensors(self.trained, names, keep=runtime.is_main)
        save.main(lambda: _save_tensors(tensors, partial / "optimizer.safetensors"))
        runtime.barrier()  # the directory exists from here on
        save.do(lambda: _save_tensors(rng_tensors(), _rng_file(partial, runtime.rank)))
        save.check()

        def publish() -> None:
            for rank in range(runtime.world):
                if not _rng_file(partial, rank).exists():
                    reason = "all processes must share output_dir"
                    raise OSError(f"rank {rank} wrote elsewhere: {reason}")
            facts = {"step": self.state.step, "config": self.config, **self.numbers()}
            atomic.publish(path, facts | {"fingerprints": self.fingerprints()})

        save.main(publish)
        save.check()
        if path == self.path():
            self.saved = self.state.step
            if runtime.is_main and prunes and self.limit is not None:
                self._prune(self.limit)
        runtime.barrier()
        return path

    def _prune(self, limit: int) -> None:
        """Remove checkpoints beyond `limit`, once the newest is known to be whole."""
        older = [step for step in self.steps() if step < self.state.step]
        doomed = older[: max(0, len(older) + 1 - limit)]
        reason = atomic.verified(self.path()) if doomed else None
        try:
            if reason is not None:
                raise OSError(f"{self.path()} is not whole: {reason}")
            for step in doomed:
                atomic.remove(self.path(step))
        except OSError as error:
            logger.warning("older checkpoints were not removed (save_total_limit): %s", error)

    def _saved_parts(self, final: bool = False) -> Iterator[tuple[str, FullWeights, Any]]:
        """Yield name, weights and module of what is saved: no reference that never moves."""
        for name, whole in self.parts.items():
            part: Any = whole.module
            if name != "reference" or (part.moves and not final):
                yield name, whole, part

    def save_models(self, save: atomic.Save, path: Path, final: bool = False) -> None:
        """Save what `from_pretrained` reads.

        Unless it is `final`, also a reference that moves; if it is, and `save_merged` is set, also
        the model with its adapter merged, in `merged/`.
        """
        for name, whole, part in self._saved_parts(final):
            with whole.gathered(save.runtime.main_host, _saves_adapter(part)):
                if name == "model":
                    save.main(lambda: failpoint("save-models"))
                    save.main(partial(part.save_pretrained, path))
                    save.main(lambda: self.tokenizer.save_pretrained(path))
                elif name == "critic":
                    moments = self.running.get("value_moments")
                    save.main(partial(part.save, path / name, moments))
                else:
                    save.main(partial(part.save, path / name))
        if final and self.config.get("save_merged"):
            policy: Any = self.parts["model"]
            with policy.gathered(save.runtime.main_host):
                save.main(lambda: merged(policy.module).save_pretrained(path / "merged"))
                save.main(lambda: self.tokenizer.save_pretrained(path / "merged"))

    def numbers(self) -> dict[str, Any]:
        """Return a copy of what changes during a run and is not a tensor."""
        return {
            "counters": asdict(self.state),
            "running": {name: dict(vars(record)) for name, record in self.running.items()},
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "learning_rates": [group["lr"] for group in self.trained.optimizer.param_groups],
        }

    def put_back(self, numbers: Mapping[str, Any]) -> None:
        """Restore what `numbers` returned."""
        scale = numbers["running"].get("learning_rate_scale", {"coef": 1.0})["coef"]
        self._load_schedule(numbers["scheduler"], numbers["learning_rates"], scale)
        vars(self.state).update(numbers["counters"])
        for name, record in self.running.items():
            vars(record).update(numbers["running"][name])

    def resume(self, choice: str | bool | None, runtime: Runtime) -> dict[str, Any]:
        """Restore a checkpoint directory, and return the config that was saved there; collective.

        True and "latest" mean the newest whole one; None restores nothing. ValueError if there is
        none, it is not whole, or a new run would mix with the checkpoints of another.
        """
        run = self.directory.parent
        if runtime.is_main:
            for name in ("best", "final"):
                atomic.recover(run / name)
            atomic.recover_all(self.directory)
        runtime.barrier()
        newest = self._newest(runtime)
        if choice in (True, "latest"):
            return self.restore(self._newest_whole(newest, runtime), runtime.rank)
        if choice:
            path = Path(str(choice))
            if (reason := self._fault(path, runtime)) is not None:
                places = (path, path / "checkpoints", path.parent / "checkpoints")
                found = [step for place in places for step in sorted(place.glob("step-*"))[-1:]]
                there = f": {found[0].parent} has {found[0].name}" if found else ""
                raise ValueError(
                    f"{path} holds no checkpoint that is whole: {reason}. Resume with latest, "
                    f"which takes the newest whole one, or from another directory{there}"
                )
            saved = self.restore(path, runtime.rank)
            if newest > self.state.step:
                raise ValueError(
                    f"{self.directory} holds checkpoints of later steps, up to "
                    f"{self.path(newest).name}: move them away, resume from the latest, or choose "
                    "another output_dir"
                )
            return saved
        if newest >= 0 and self.state.step == 0:
            end = atomic.state(run / "final").get("step", -1) if runtime.is_main else -1
            if runtime.all_reduce_max(end) < newest:  # it has not come to its end
                raise ValueError(
                    f"{run} holds the checkpoints of an earlier run: go on with it "
                    "(--resume_from_checkpoint latest), or choose another output_dir"
                )
        return {}

    def _newest(self, runtime: Runtime, below: int | None = None) -> int:
        """Return the largest step of which any process sees a checkpoint; -1 if there is none."""
        own = [step for step in self.steps() if below is None or step < below]
        return runtime.all_reduce_max(max(own, default=-1))

    def _newest_whole(self, newest: int, runtime: Runtime) -> Path:
        """Return the newest checkpoint that is whole on every process; log which ones are not."""
        broken: list[str] = []
        while newest >= 0:
            path = self.path(newest)
            reason = self._fault(path, runtime)
            if reason is None:
                if broken and runtime.is_main:
                    logger.warning("going on from %s: %s", path, "; ".join(broken))
                return path
            broken.append(f"{path.name} is not whole ({reason})")
            newest = self._newest(runtime, below=newest)
        none = f"{self.directory} has no whole checkpoint to resume from"
        raise ValueError("; ".join([none, *broken]))

    def _fault(self, path: Path, runtime: Runtime) -> str | None:
        """Return why not every process can resume from a checkpoint, or None; collective."""
        reason = atomic.verified(path, contents=runtime.is_main)
        if reason is None and "counters" not in atomic.state(path):
            reason = "it is a model alone, as final/ is, without optimizer and counters"
        return runtime.first_error(reason)

    def restore(self, path: Path, rank: int) -> dict[str, Any]:
        """Restore a saved state of this run (`compatibility.check`); return the config in it."""
        state = atomic.state(path)
        config = {key: value for key, value in self.config.items() if key not in self.found}
        counters, prints = asdict(self.state), self.fingerprints()
        warnings = compatibility.check(path, state, config, prints, self.running, counters)
        for warning in warnings if rank == 0 else ():
            logger.warning("%s %s", path, warning)
        for name, whole, part in self._saved_parts():
            with whole.modified(_saves_adapter(part)):
                if name == "model":
                    load_weights(part, path)
                else:
                    part.restore(path / name)
        self.trained.load_state(stored_state(path / "optimizer.safetensors", self.parameters))
        self.put_back(state)
        self.saved = self.state.step if path.resolve() == self.path().resolve() else None
        best = self.directory.parent.resolve() / "best"
        here = path.resolve().parent in (best.parent, self.directory.resolve())
        if self.config.get("save_best", True) and not (here and best.exists()):
            self.state.best_reward = None  # the best checkpoint stayed in the other directory
        if (rng := _rng_file(path, rank)).exists():
            restore_rng(load_file(rng))
        return dict(state["config"])

    def _load_schedule(self, saved: dict[str, Any], rates: list[float], scale: float) -> None:
        """Restore the schedule's position; peaks and length are this run's, which may differ."""
        peaks = getattr(self.scheduler, "base_lrs", None)  # not every scheduler has them
        self.scheduler.load_state_dict(saved)
        if peaks is not None:
            before, self.scheduler.base_lrs = self.scheduler.base_lrs, peaks
            rates = [
                rate * new / old if old not in (0, new) else rate
                for rate, new, old in zip(rates, peaks, before, strict=True)
            ]
        if isinstance(self.scheduler, LambdaLR):  # our own; its rates depend on the run's length
            at, step = self.scheduler.lr_lambdas, self.scheduler.last_epoch
            rates = [peak * f(step) * scale for peak, f in zip(peaks or (), at, strict=True)]
        for group, rate in zip(self.trained.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def optimizer_tensors(
    trained: DDPBackend, names: Mapping[Tensor, str], keep: bool = True
) -> dict[str, Tensor]:
    """Return `{parameter name}.{key}` -> tensor, on the CPU; without `keep` only help to gather."""
    return {
        f"{names[parameter]}.{key}": value.cpu().contiguous()
        for parameter, key, value in trained.state()
        if keep
    }


def stored_state(path: Path, parameters: Mapping[str, Tensor]) -> Iterator[State]:
    """Yield what `optimizer_tensors` gave and `save_file` saved, tensor by tensor."""
    with safe_open(path, framework="pt") as file:
        for full_name in file.keys():  # noqa: SIM118 (it is no dict)
            name, key = full_name.rsplit(".", 1)
            yield parameters[name], key, file.get_tensor(full_name)


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    failpoint("save-tensors")
    save_file(tensors, file)
    atomic.sync(file)  # the main process may be on another machine


def _rng_file(path: Path, rank: int) -> Path:
    return path / f"rng-rank{rank}.safetensors"


def _saves_adapter(module: nn.Module) -> bool:
    """Return whether only the module's trained adapter is saved."""
    adapted = [part for part in module.modules() if isinstance(part, PeftModel)]
    return any(p.requires_grad for part in adapted for p in part.parameters())
