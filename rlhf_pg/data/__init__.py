"""Prompts and chats as token ids, and the batch that goes from the rollout to the update."""

from typing import TYPE_CHECKING, Any

from rlhf_pg.data.rows import Row as Row

if TYPE_CHECKING:
    from rlhf_pg.data.batch import Batch as Batch
    from rlhf_pg.data.chat import vocabulary_fingerprint as vocabulary_fingerprint
    from rlhf_pg.data.prompts import (
        Prompt as Prompt,
        Prompts as Prompts,
        PromptSampler as PromptSampler,
    )
else:
    NAMES = ("Batch", "vocabulary_fingerprint", "Prompt", "Prompts", "PromptSampler")

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: a report needs neither torch nor datasets."""
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rlhf_pg.data import batch, chat, prompts

        home = next(module for module in (batch, chat, prompts) if hasattr(module, name))
        return getattr(home, name)
