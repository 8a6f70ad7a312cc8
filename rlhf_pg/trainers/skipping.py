"""Updates that are skipped because the loss or the gradient is not finite."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from rlhf_pg.checkpoint.checkpointer import TrainState
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch

logger = logging.getLogger(__name__)


class SkippedUpdates:
    """Count skipped updates, and keep their batches in `output_dir/skipped/step-N/`.

    All processes skip together, since the norm that they go by is that of all.

    Args:
        state: has the number of steps in a row, which a resumed run goes on with.

    Attributes:
        keeps: False only counts them, for a step that is made again.
    """

    def __init__(
        self,
        args: PolicyGradientConfig,
        state: TrainState,
        tokenizer: PreTrainedTokenizerBase,
        rank: int,
    ) -> None:
        self.keeps = True
        self._most, self._state = args.max_skipped_steps, state
        self._directory = Path(args.output_dir) / "skipped"
        self._tokenizer, self._rank = tokenizer, rank

    def skip(self, minibatch: Batch, norm: float, step: int, update: int) -> None:
        """Record a skipped update: keep its batch, and log it.

        Args:
            step: counted from 1.
            update: of this step, counted from 0.
        """
        place = self._of(step)
        self._dump(minibatch, place, {"step": step, "update": update, "norm": str(norm)})
        if self._rank == 0:
            logger.warning(
                "step %d, update %d: the gradient is not finite (norm %s); the update is skipped, "
                "and its batch is in %s",
                *(step, update, norm, place),
            )

    def end(self, step: int, updates: int) -> None:
        """Finish a step; give up after too many without an update.

        Args:
            updates: how many of it were made.

        Raises:
            FloatingPointError: more than `max_skipped_steps` steps in a row made none. Steps count,
                not updates, since one bad batch may spoil every pass over it.
        """
        before = self._state.skipped_in_a_row
        self._state.skipped_in_a_row = 0 if updates else before + 1
        if self._state.skipped_in_a_row > self._most:
            raise FloatingPointError(
                f"step {step}: the gradient is not finite in any update, like those of {before} "
                "steps right before it (max_skipped_steps); the weights are as before these, and "
                f"the batch is in {self._of(step)}. Lower learning_rate or max_grad_norm, or use "
                "dtype float32"
            )

    def _of(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def _dump(self, minibatch: Batch, place: Path, what: dict[str, Any]) -> None:
        """Write this process's rows, if it has any; a full disk does not end the run."""
        if not (self.keeps and len(minibatch.groups)):
            return
        stem = f"update{what['update']}-rank{self._rank}"
        fields = {field.name for field in dataclasses.fields(minibatch)}
        there = {name: x for name in sorted(fields) if (x := getattr(minibatch, name)) is not None}
        try:
            place.mkdir(parents=True, exist_ok=True)
            tensors = {name: x.detach().cpu().contiguous() for name, x in there.items()}
            save_file(tensors, place / f"{stem}.safetensors")
            # Whatever is not printable ASCII is escaped.
            text = json.dumps(what | {"rows": self._texts(minibatch)}, indent=2)
            (place / f"{stem}.json").write_text(text)
        except (OSError, SafetensorError) as error:
            logger.warning("the batch of a skipped update cannot be kept: %s", error)

    def _texts(self, minibatch: Batch) -> list[dict[str, Any]]:
        parts = {
            "prompt": (minibatch.prompt_ids, minibatch.prompt_mask),
            "completion": (minibatch.completion_ids, minibatch.completion_mask),
        }
        return [
            {"group": group}
            | {name: self._tokenizer.decode(ids[i][mask[i]]) for name, (ids, mask) in parts.items()}
            for i, group in enumerate(minibatch.groups.tolist())
        ]
