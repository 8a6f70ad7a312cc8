"""The picture of a run."""

from rlhf_pg.report.curve import save_curve, show_curve

__all__ = ["save_curve", "show_curve"]
