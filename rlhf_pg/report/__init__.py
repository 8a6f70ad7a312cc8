"""Reports of a run on itself: numbers, lines, curves, trackers, pages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.report.curve import save_curve as save_curve
    from rlhf_pg.report.curve import show_curve as show_curve
    from rlhf_pg.report.metrics import Meter as Meter
else:

    def __getattr__(name: str) -> Any:
        """Import what takes seconds (torch) when it is first asked for: pages do without."""
        if name == "Meter":
            from rlhf_pg.report.metrics import Meter

            return Meter
        if name in ("save_curve", "show_curve"):
            from rlhf_pg.report import curve

            return getattr(curve, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
