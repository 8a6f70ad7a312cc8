"""Reports of a run on itself: numbers, lines, curves, trackers."""

from rlhf_pg.report.curve import save_curve as save_curve
from rlhf_pg.report.curve import show_curve as show_curve
from rlhf_pg.report.metrics import Meter as Meter
