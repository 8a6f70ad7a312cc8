"""A checkpoint on the way out, whatever ends a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_pg.trainers.base import PolicyGradientTrainer

logger = logging.getLogger(__name__)


@contextmanager
def saved_on_leaving(trainer: PolicyGradientTrainer) -> Iterator[None]:
    """Around the steps of a run: an error or Ctrl-C that ends it costs no step that was finished.

    In several processes only where all end at once, in one step: an error of one alone leaves the
    others in a collective, from which nothing calls them back. A failure to save is logged, and
    what ended the run is raised. Nothing is saved of a run that has diverged, and no checkpoint
    that was there makes room: weights of half a step are no substitute for those of a whole one.
    """
    try:
        yield
    except FloatingPointError:  # what is there is from before it diverged, or nearer to that
        raise
    except BaseException as error:
        try:
            path = _save(trainer)
        except Exception as another:
            logger.warning("what was trained since the last checkpoint is lost: %s", another)
        else:
            if path is not None:
                error.add_note(f"The run goes on from {path} (--resume_from_checkpoint latest).")
        raise


def _save(trainer: PolicyGradientTrainer) -> Path | None:
    """The checkpoint of the last finished step, if there is anything new to save."""
    begun = trainer.learner.begun
    trainer.take_back_step()
    step = trainer.state.step
    if not step or trainer.checkpointer.saved == step:
        return None
    if not trainer.runtime.leave_together(f"step {step}, update {begun}"):
        return None
    with trainer.checkpointer.removing_none():
        path = trainer.save_checkpoint()
    if begun and trainer.runtime.is_main:
        logger.warning(
            "%s contains %d updates of the interrupted step %d; that step will be repeated, so the "
            "run will not be bit-identical",
            *(path, begun, step + 1),
        )
    return path
