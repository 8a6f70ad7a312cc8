"""Estimates of a run before anything is loaded: memory by part, and the time of a step."""

from rlhf_pg.plan.devices import DEVICES
from rlhf_pg.plan.memory import Memory, predicted_memory
from rlhf_pg.plan.meta_models import MetaModels, build_meta_models
from rlhf_pg.plan.shapes import shape_of
from rlhf_pg.plan.show import job_of, paper_table, said_beside
from rlhf_pg.plan.throughput import Pace, Rates, measured_rates, predicted_pace
