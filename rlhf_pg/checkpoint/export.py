"""The model of a run as `from_pretrained` reads it, without what only a resumed run needs."""

from pathlib import Path
from typing import Any

from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.checkpointer import Checkpointer
from rlhf_pg.models import merged
from rlhf_pg.runtime import Runtime, Writing


def save(checkpointer: Checkpointer, runtime: Runtime, path: Path) -> None:
    """Write model (or its adapter), tokenizer and critic into a directory; collective.

    Raises:
        OSError: on all processes, they could not be written.
    """
    writing = Writing(runtime, path)
    _write(checkpointer, writing, writing.path)
    writing.check()
    runtime.barrier()


def save_atomically(checkpointer: Checkpointer, runtime: Runtime, path: Path) -> None:
    """Save as `save` does, but all of it appears or the old directory stays."""
    writing, unnamed = Writing(runtime, path), atomic.partial_of(path)
    writing.main(lambda: atomic.begin(path))
    _write(checkpointer, writing, unnamed)
    writing.main(lambda: atomic.seal(unnamed, {"step": checkpointer.state.step}))
    writing.main(lambda: atomic.publish(path))
    writing.check(undo=lambda: atomic.abandon(path))
    runtime.barrier()


def _write(checkpointer: Checkpointer, writing: Writing, path: Path) -> None:
    checkpointer.save_models(writing, path, final=True)
    if checkpointer.config.get("save_merged"):
        policy, tokenizer = checkpointer.parts["model"], checkpointer.tokenizer
        with policy.gathered(writing.runtime.main_host):
            module: Any = policy.module
            writing.main(lambda: merged(module).save_pretrained(path / "merged"))
            writing.main(lambda: tokenizer.save_pretrained(path / "merged"))
