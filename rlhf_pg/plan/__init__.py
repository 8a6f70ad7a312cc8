"""What a run will take, before anything is loaded: memory by part, and the time of a step."""

from rlhf_pg.plan.drawn import Drawn, draw
from rlhf_pg.plan.memory import Memory, predicted_memory
from rlhf_pg.plan.pace import Pace, Rates, measured_rates, predicted_pace

__all__ = [
    "Drawn",
    "Memory",
    "Pace",
    "Rates",
    "draw",
    "measured_rates",
    "predicted_memory",
    "predicted_pace",
]
