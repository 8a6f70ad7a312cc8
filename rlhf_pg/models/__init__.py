"""The policy, its frozen reference and its critic, and loading them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.models.critic import Critic as Critic
    from rlhf_pg.models.policy import (
        Policy as Policy,
        PolicyOutput as PolicyOutput,
        Reference as Reference,
    )
else:
    NAMES = ("Critic", "Policy", "PolicyOutput", "Reference")

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: an engine needs no critic."""
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rlhf_pg.models import critic, policy

        return getattr(policy if hasattr(policy, name) else critic, name)
