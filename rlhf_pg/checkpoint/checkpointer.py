"""Save and restore a training state: weights, optimizer, schedule, random states, counters.

A checkpoint is a directory that `from_pretrained` reads, with three files beside the model (or its
adapter): `optimizer.safetensors` (by parameter name), `rng-rank{r}.safetensors` and `state.json`;
`critic/`, where there is one, and `reference/` and `teacher/` where they move; batches sampled
ahead. Nothing is pickled.
`state.json` has the size and hash of every file: a run never resumes from a damaged checkpoint.
"""

import copy
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedTokenizerBase

from rlhf_pg import __version__
from rlhf_pg.boundary.output_files import PARTIAL, sync
from rlhf_pg.boundary.quoted import tell
from rlhf_pg.checkpoint import atomic, compatibility
from rlhf_pg.failpoints import failpoint
from rlhf_pg.models import streaming
from rlhf_pg.models.adapters import merge, saves_base
from rlhf_pg.models.loading import load_weights
from rlhf_pg.rng import restore_rng, rng_tensors
from rlhf_pg.runtime import DDPBackend, FullWeights, Runtime, State, full, put

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer.safetensors"
RNG = "rng-rank{}.safetensors"
# In each part, the prefix of the weights of the model whose files are saved.
PREFIXES = {
    "model": "",
    "critic": "model.",
    "reference": "policy.model.",
    "teacher": "policy.model.",
}


@dataclass
class TrainState:
    """The counters of a run."""

    step: int = 0  # rollout batches trained on
    prompt_index: int = 0  # index of the next prompt: the data cursor, and seed of its noise
    num_tokens: int = 0  # prompt and completion tokens so far
    best_reward: float | None = None  # highest eval_reward so far
    skipped_in_a_row: int = 0  # consecutive latest steps with every update skipped


@dataclass
class Checkpointer:
    """Saves and restores everything that a run needs to resume bit for bit."""

    directory: Path
    parts: Mapping[str, FullWeights]  # "model"; "critic", "reference", "teacher" if they exist
    tokenizer: PreTrainedTokenizerBase
    backend: DDPBackend
    scheduler: LRScheduler
    state: TrainState
    config: dict[str, Any]
    fingerprints: Callable[[], Mapping[str, str | None]]  # by part; constant during a run
    running: Mapping[str, Any] = field(default_factory=dict)  # changing records, by name
    limit: int | None = None  # number of checkpoints to keep; None keeps all
    found: Collection[str] = ()  # keys set to auto; a resumed run takes over their values
    ahead: Any = None  # an `Ahead`, whose batches belong to the state
    saved_step: int | None = None  # the last that this process saved
    origin: str | None = None  # the checkpoint of another run that was restored

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name; the critic's names begin with "critic."."""
        parameters: dict[str, Tensor] = dict(self.parts["model"].pieces.named_parameters())
        if "critic" in self.parts:
            parameters |= self.parts["critic"].pieces.named_parameters(prefix="critic")
        return parameters

    def path(self, step: int | None = None) -> Path:
        """Return the path of the checkpoint of a step, by default of the latest step."""
        if step is None:
            step = self.state.step
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, in order."""
        paths = self.directory.glob("step-" + "[0-9]" * 8)
        return sorted(int(path.name.removeprefix("step-")) for path in paths)

    def save(self, runtime: Runtime, path: Path | None = None, prunes: bool = True) -> Path:
        """Write a checkpoint, by default under its step; it gets its name when it is complete.

        If it `prunes`, older checkpoints beyond `limit` are removed.

        Raises:
            OSError: on all processes, it could not be written. An earlier checkpoint in its place
                is unchanged, unless the new one was complete except for its name.
        """
        path = path or self.path()
        save = atomic.Save(runtime, path)
        partial = atomic.partial_of(path)
        run = self.directory.parent
        save.main(lambda: run.mkdir(mode=0o700, parents=True, exist_ok=True))
        save.main(lambda: atomic.begin(path))
        self.save_models(save, partial)
        names = {p: name for name, p in self.parameters.items()}
        tensors = optimizer_tensors(self.backend, names)
        if runtime.splits:  # one by one
            with save.step():
                file = partial / OPTIMIZER if runtime.is_main else None
                streaming.write(file, tensors, 4 * len(names))
        else:
            gathered = {name: value for name, value in tensors if runtime.is_main}
            save.main(lambda: _save_tensors(gathered, partial / OPTIMIZER))
        with save.step():
            _save_tensors(rng_tensors(), partial / RNG.format(runtime.rank))
        if self.ahead is not None:
            self.ahead.drain()
            with save.step():
                self.ahead.save(partial, runtime.rank, self.state.step)
        facts = {
            "step": self.state.step,
            "version": __version__,
            "config": self.config,
            **self.snapshot(),
            "fingerprints": self.fingerprints(),
        }
        save.main(lambda: atomic.publish(path, facts))
        if path == self.path():
            self.saved_step = self.state.step
            if runtime.is_main and prunes and self.limit is not None:
                older = [step for step in self.steps() if step < self.state.step]
                excess = max(0, len(older) + 1 - self.limit)
                try:
                    for step in older[:excess]:
                        atomic.remove(self.path(step))
                except OSError as error:
                    text = "older checkpoints cannot be removed (save_total_limit): %s"
                    logger.warning(text, error)
        return path

    def _parts_to_save(self, final: bool = False) -> Iterator[tuple[str, FullWeights, Any]]:
        """Yield name, weights and module of each saved part; a fixed model is not saved."""
        for name, weights in self.parts.items():
            part: Any = weights.module
            if name in ("model", "critic") or (part.moves and not final):
                yield name, weights, part

    def save_models(self, save: atomic.Save, path: Path, final: bool = False) -> None:
        """Save the models as `from_pretrained` reads them.

        This includes a moving reference, unless `final`: then `save_merged` adds the model with its
        adapter merged, in `merged/`.
        """
        runtime = save.runtime
        for name, weights, part in self._parts_to_save(final):
            folder = path if name == "model" else path / name
            adapted = _saves_adapter(part)
            trunk = _trunk(name, part)
            if hasattr(trunk, "stored") and not adapted:
                self._stream(save, name, weights, trunk, folder)
                continue
            alone = adapted and not saves_base(trunk)
            with weights.gathered(runtime.main_host, alone), save.step():
                if not runtime.is_main:
                    continue
                if name == "model":
                    failpoint("save-models")
                    part.save_pretrained(path)
                    generation = getattr(part, "generation_config", None)
                    if adapted and generation:
                        generation.save_pretrained(path)  # which tokens end a turn
                    self.tokenizer.save_pretrained(path)
                elif name == "critic":
                    part.save(folder, self.running.get("value_moments"))
                else:
                    part.save(folder)
        if final and self.config.get("save_merged"):
            policy: Any = self.parts["model"]
            folder = path / "merged"
            with policy.gathered(runtime.main_host), save.step():
                if runtime.is_main:
                    try:
                        merge(policy.module).save_pretrained(folder)
                        self.tokenizer.save_pretrained(folder)
                    except (RuntimeError, ValueError) as error:  # the adapter is saved anyway
                        shutil.rmtree(folder, ignore_errors=True)
                        logger.warning("%s has no merged/: %s", save.path, tell(error))

    def _stream(
        self,
        save: atomic.Save,
        name: str,
        weights: FullWeights,
        trunk: Any,
        folder: Path,
    ) -> None:
        """Save a model like `save_models`, tensor by tensor."""
        is_main = save.runtime.is_main
        pieces = dict(weights.pieces.named_parameters())
        with save.step():
            tensors, count = weights.tensors(PREFIXES[name], trunk)
            streaming.save(folder if is_main else None, trunk, tensors, count)
            if is_main:
                failpoint("save-models")
        if name == "model":
            save.main(lambda: self.tokenizer.save_pretrained(folder))
        critic: Any = weights.module
        if name == "critic":
            with save.step():
                head = {n: full(pieces[f"head.{n}"]).cpu() for n in ("weight", "bias")}
                if is_main:
                    critic.save_head(folder, self.running.get("value_moments"), head)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all state that changes during a run, except tensors."""
        return {
            "counters": asdict(self.state),
            "running": {name: dict(vars(record)) for name, record in self.running.items()},
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "learning_rates": [group["lr"] for group in self.backend.optimizer.param_groups],
        }

    def roll_back(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state of a `snapshot`."""
        peaks = getattr(self.scheduler, "base_lrs", [])
        rates = snapshot["learning_rates"]
        self.scheduler.load_state_dict(snapshot["scheduler"])
        if isinstance(self.scheduler, LambdaLR):  # ours: keep this run's peaks and length
            self.scheduler.base_lrs = peaks
            step = self.scheduler.last_epoch
            scale = snapshot["running"].get("learning_rate_scale", {"coef": 1.0})["coef"]
            rates = []
            for peak, factor in zip(peaks, self.scheduler.lr_lambdas, strict=True):
                rates.append(peak * factor(step) * scale)
        for group, rate in zip(self.backend.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        vars(self.state).update(snapshot["counters"])
        for name, record in self.running.items():
            vars(record).update(snapshot["running"][name])

    def resume(self, choice: str | bool | None, runtime: Runtime) -> dict[str, Any]:
        """Restore a checkpoint directory, and return the config that was saved there; collective.

        True and "latest" mean the newest complete one; None restores nothing. ValueError if there
        is none, it is incomplete, or a new run would mix with the checkpoints of another.
        """
        run = self.directory.parent
        if runtime.is_main:
            atomic.recover(run / "best")
            atomic.recover(run / "final")
            for partial in [*self.directory.glob(f"{PARTIAL}*")]:
                atomic.recover(self.directory / partial.name.removeprefix(PARTIAL))
        runtime.barrier()
        steps: list[int] = runtime.gather_objects(self.steps())[0]
        newest = max(steps, default=-1)
        if choice:
            is_latest = choice in (True, "latest")
            paths = [Path(str(choice))]
            if is_latest:
                paths = [self.path(step) for step in reversed(steps)]
            faults = []
            for path in paths:
                reason = self._fault(path, runtime)
                if reason is None:
                    break
                faults.append(f"{path} is not complete ({reason})")
            else:
                text = f"{self.directory if is_latest else choice} has no complete checkpoint: "
                text += "; ".join(faults) or "there is none"
                if steps and not is_latest:
                    text += f". {self.directory} has {self.path(newest).name}"
                raise ValueError(text)
            if faults and runtime.is_main:
                logger.warning("resuming from %s: %s", path, "; ".join(faults))
            saved = self.restore(path, runtime.rank)
            if not is_latest and newest > self.state.step:
                raise ValueError(
                    f"{self.directory} has checkpoints of later steps, up to "
                    f"{self.path(newest).name}: move them away, resume from the latest, or choose "
                    "another output_dir"
                )
            return saved
        if steps and self.state.step == 0:
            end = -1
            if runtime.is_main:
                end = atomic.state(run / "final").get("step", -1)
            if runtime.all_reduce_max(end) < newest:  # it has not finished
                raise ValueError(
                    f"{run} has the checkpoints of an earlier run: resume it "
                    "(--resume_from_checkpoint latest), or choose another output_dir"
                )
        return {}

    def _fault(self, path: Path, runtime: Runtime) -> str | None:
        """Return why some process cannot resume from a checkpoint, or None; collective."""
        reason = atomic.find_damage(path, contents=runtime.is_main)
        if reason is None and "counters" not in atomic.state(path):
            reason = "it is only a model, like final/, without optimizer and counters"
        return runtime.first_error(reason)

    def restore(self, path: Path, rank: int) -> dict[str, Any]:
        """Restore a saved state of this run (`compatibility.check`); return its config."""
        state = atomic.state(path)
        altered = compatibility.check(
            path,
            state,
            {key: value for key, value in self.config.items() if key not in self.found},
            self.fingerprints(),
            self.running,
            asdict(self.state),
        )
        if altered and rank == 0:
            logger.warning("%s is resumed with other settings: %s", path, altered)
        for name, weights, part in self._parts_to_save():
            folder = path if name == "model" else path / name
            adapted = _saves_adapter(part)
            if hasattr(_trunk(name, part), "stored") and not adapted:
                self._read(name, weights, folder)
                continue
            with weights.modify(adapted):
                if name == "model":
                    load_weights(part, folder)
                else:
                    part.restore(folder)
        self.backend.load_state(read_state(path / OPTIMIZER, self.parameters))
        self.roll_back(state)
        if self.ahead is not None:
            self.ahead.restore(path)
        resolved = path.resolve()
        self.saved_step = self.state.step if resolved == self.path().resolve() else None
        run = self.directory.parent.resolve()
        is_here = resolved.parent in (run, self.directory.resolve())
        self.origin = None if is_here else str(resolved)
        if self.config.get("save_best", True) and not (is_here and (run / "best").exists()):
            self.state.best_reward = None  # the best checkpoint is in the other directory
        rng = path / RNG.format(rank)
        if rng.exists():
            restore_rng(load_file(rng))
        return dict(state["config"])

    def _read(self, name: str, weights: FullWeights, folder: Path) -> None:
        """Restore what `_stream` saved, tensor by tensor."""
        critic: Any = weights.module
        for full_name, piece in weights.pieces.named_parameters():
            if full_name.startswith("head."):
                value = critic.saved_head(folder)[full_name.removeprefix("head.")]
            else:
                value = streaming.read(str(folder), "", full_name.removeprefix(PREFIXES[name]))
            put(piece, value)


def _trunk(name: str, part: Any) -> Any:
    """Return the model with the files of a saved part."""
    if name == "model":
        return part
    return part.model if name == "critic" else part.policy.model


def optimizer_tensors(
    trained: DDPBackend, names: Mapping[Tensor, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `{parameter name}.{key}` and the whole tensor, on the CPU; collective."""
    for parameter, key, value in trained.state():
        yield f"{names[parameter]}.{key}", value.cpu().contiguous()


def read_state(path: Path, parameters: Mapping[str, Tensor]) -> Iterator[State]:
    """Yield the saved `optimizer_tensors`, tensor by tensor."""
    with safe_open(path, framework="pt") as file:
        for full_name in file.keys():  # noqa: SIM118 (it is not a dict)
            name, key = full_name.rsplit(".", 1)
            yield parameters[name], key, file.get_tensor(full_name)


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    failpoint("save-tensors")
    save_file(tensors, file)
    sync(file)  # the main process may be on another machine


def _saves_adapter(module: nn.Module) -> bool:
    """Return whether only an adapter is saved for the module."""
    adapted = [part for part in module.modules() if isinstance(part, PeftModel)]
    return any(p.requires_grad for part in adapted for p in part.parameters())
