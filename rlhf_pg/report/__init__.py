"""Reports of a run on itself: numbers, lines, trackers, pages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.report.metrics import Meter as Meter
else:

    def __getattr__(name: str) -> Any:
        """Import `Meter` when it is first asked for: pages do without torch."""
        if name == "Meter":
            from rlhf_pg.report.metrics import Meter

            return Meter
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
