"""Shared parts of supervised runs: arguments of the `Trainer`, resuming, saving."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.compatibility import MAY_CHANGE, OF_DATA, WARNED, changed
from rlhf_pg.checkpoint.run_dir import locked, set_aside
from rlhf_pg.config import dump
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.models import fingerprint as fingerprint_of_weights
from rlhf_pg.report.run_files import JsonLines

logger = logging.getLogger(__name__)

# Keys that are the `Trainer`'s arguments of the same name.
ALIKE = (
    *("output_dir", "run_name", "seed", "max_steps", "num_train_epochs", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "logging_steps"),
    "save_total_limit",
)
TIMED = ("_runtime", "_per_second", "epoch", "_preparation_time")  # of the `Trainer`'s own metrics
MODEL = "model.sha256"  # file with the fingerprint of the model that a resumed run needs
# Limits of an automatic micro-batch: padded tokens, and their logits. The logits are 1 GiB in
# float32, and the loss needs three to four times as much at its peak.
TOKENS, LOGITS = 16384, 2**28


def training_arguments(
    args: SupervisedConfig, longest: int, use_cpu: bool = False, vocabulary: int = 1, **options: Any
) -> TrainingArguments:
    """Return the `Trainer`'s arguments; `longest` in tokens, `vocabulary` in logits of a token."""
    on_gpu = torch.cuda.is_available() and not use_cpu
    arguments = TrainingArguments(
        **{key: getattr(args, key) for key in ALIKE},
        bf16=args.dtype == "bfloat16",
        eval_strategy="steps" if args.eval_steps else "no",
        eval_steps=args.eval_steps or None,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to=list(args.report_to) or "none",
        use_cpu=not on_gpu,
        disable_tqdm=not sys.stdout.isatty(),
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
        **options,
    )
    if on_gpu:
        arguments._n_gpu = 1  # one process trains on one GPU; DataParallel would multiply the batch
    own, rest = divmod(args.batch_size, arguments.world_size)
    if rest:
        raise ValueError(
            f"batch_size {args.batch_size} cannot be split evenly over {arguments.world_size} "
            "processes: make it a multiple of that number"
        )
    micro = micro_batch_size(own, args.micro_batch_size, longest, vocabulary)
    arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = micro
    arguments.gradient_accumulation_steps = own // micro
    return arguments


def micro_batch_size(own: int, wanted: int | str, longest: int, vocabulary: int = 1) -> int:
    """Return the number of examples in a micro-batch: a divisor of this process's share `own` of a
    batch.

    "auto" keeps examples of `longest` tokens within `TOKENS`, and their logits within `LOGITS`;
    ValueError for a number that does not divide the share.
    """
    if isinstance(wanted, int):
        if own % wanted and wanted < own:
            raise ValueError(
                f"micro_batch_size {wanted} does not divide the {own} examples of a process in a "
                "batch: choose a divisor, or auto"
            )
        return min(wanted, own)
    most = max(1, min(TOKENS, LOGITS // vocabulary) // longest)
    return max(size for size in range(1, min(own, most) + 1) if own % size == 0)


def run(trainer: Trainer, args: SupervisedConfig, save: Callable[[Path], None]) -> dict[str, float]:
    """Train, evaluate and save in `args.output_dir`, which is locked for other runs.

    An earlier run in it is set aside, unless one of its checkpoints is resumed. The metrics on
    held-out data, if there are any, are in `metrics.json` too. Every process calls `save`, which
    writes the model into a directory. ValueError if another run uses the directory, it cannot be
    written to, or has no checkpoint.
    """
    directory, is_main = Path(args.output_dir), trainer.is_world_process_zero()
    checkpoint, data = checkpoint_of(args), fingerprint(trainer.train_dataset)
    if args.dataset_fingerprint not in (None, data):
        raise ValueError(
            f"the training data have the fingerprint {data}, but dataset_fingerprint is "
            f"{args.dataset_fingerprint}: the data or the tokenizer differ; leave "
            "dataset_fingerprint out to train on them"
        )
    args = replace(args, dataset_fingerprint=data)
    model = model_fingerprint(trainer.model) if is_main else None  # may be sharded elsewhere
    if checkpoint is not None:
        check_resumed(Path(checkpoint), args, model)
        trainer.accelerator.wait_for_everyone()  # before the config is written again
    goes_on = checkpoint is not None and Path(checkpoint).resolve().parent == directory.resolve()
    with locked(directory) if is_main else nullcontext():
        if is_main:
            if not goes_on and (moved := set_aside(directory)) is not None:
                print(moved, flush=True)
            dump(args, directory / "config.yaml")
            (directory / MODEL).write_text(f"{model}\n")
            trainer.add_callback(_Journal(directory / "metrics.jsonl"))
        trainer.train(resume_from_checkpoint=checkpoint)
        measured = sorted(trainer.evaluate().items()) if trainer.eval_dataset else []
        metrics = {name: float(value) for name, value in measured if not name.endswith(TIMED)}
        # The model is saved completely or not at all; every process takes part.
        final, wait = directory / "final", trainer.accelerator.wait_for_everyone
        partial = atomic.partial_of(final)
        if is_main:
            atomic.begin(final)
        wait()
        save(partial)
        wait()
        if is_main:
            if not list(partial.rglob("*.safetensors")):
                raise ValueError(
                    f"no weights were saved in {partial}: with FSDP, set fsdp_state_dict_type to "
                    "FULL_STATE_DICT"
                )
            atomic.publish(final, {"step": trainer.state.global_step})
            (directory / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
            said = [f"{n.removeprefix('eval_')} {value:.3f}" for n, value in metrics.items()]
            held_out = f"held-out {', '.join(said)}; " if said else ""
            print(f"{held_out}saved {final}", flush=True)
    return metrics


def checkpoint_of(args: SupervisedConfig) -> str | None:
    """Return the checkpoint that a config resumes from, if any; its state is written last."""
    choice = args.resume_from_checkpoint
    if choice is None:
        return None
    latest = choice == "latest"
    candidates = Path(args.output_dir).glob("checkpoint-*") if latest else [Path(choice)]
    numbers = {path: path.name.rpartition("-")[2] for path in candidates}
    whole = {
        int(number): str(path)
        for path, number in numbers.items()
        if number.isdecimal() and (path / "trainer_state.json").exists()
    }
    if not whole:
        raise ValueError(
            f"resume_from_checkpoint: {args.output_dir if latest else choice} has no complete "
            "checkpoint: pass a directory checkpoint-N of an output_dir"
        )
    return whole[max(whole)]


def check_resumed(checkpoint: Path, args: SupervisedConfig, model: str | None) -> None:
    """Refuse to resume with other data, model (by fingerprint) or keys that change the result."""
    loaded, recorded = checkpoint.parent / MODEL, checkpoint.parent / "config.yaml"
    if model is not None and loaded.exists() and loaded.read_text().strip() != model:
        raise ValueError(
            f"{checkpoint} was saved by a run with another model: resume with the same base model "
            "and adapter (model_name_or_path, or model and peft_config)"
        )
    if not recorded.exists():
        return
    saved, now = yaml.safe_load(recorded.read_text()), json.loads(json.dumps(asdict(args)))
    kept = now.keys() - (MAY_CHANGE | {"micro_batch_size"}) | {"dataset_fingerprint"}
    if args.dataset_fingerprint is None:
        kept |= OF_DATA
    if altered := changed(saved, now, WARNED & MAY_CHANGE):
        logger.warning("%s is resumed with other settings: %s", checkpoint, altered)
    for key in sorted(kept & saved.keys()):
        if saved[key] != now[key]:
            raise ValueError(
                f"{checkpoint} was saved by a run with {key} {saved[key]!r}, but it is now "
                f"{now[key]!r}: resume with the same, or start a new run from its weights"
            )


def fingerprint(rows: Any) -> str:
    """Return the SHA-256 of rows, as dicts or tuples, whose values are token ids or numbers."""
    digest = hashlib.sha256()
    for row in rows:
        for value in row.values() if isinstance(row, dict) else row:
            digest.update(np.asarray(value, dtype=np.float64).tobytes() + b"|")
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of a model's frozen weights, shapes, and scales of adapters."""
    parts = [(n, part) for n, part in model.named_modules() if isinstance(part, LoraLayer)]
    factors = [f"{n} {part.scaling}" for n, part in parts]  # lora_alpha / r, not in any tensor
    return hashlib.sha256("\n".join([fingerprint_of_weights(model), *factors]).encode()).hexdigest()


class _Journal(TrainerCallback):  # type: ignore[misc]
    """Writes the `Trainer`'s logs to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        self.lines = JsonLines(self.path, keep_through_step=state.global_step)

    def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
        self.lines.write({"step": state.global_step, **(logs or {})})
