"""Estimates of a run before anything is loaded: memory by part, and the time of a step."""

from rlhf_pg.plan.devices import DEVICES as DEVICES
from rlhf_pg.plan.memory import Memory as Memory
from rlhf_pg.plan.memory import predicted_memory as predicted_memory
from rlhf_pg.plan.meta_models import MetaModels as MetaModels
from rlhf_pg.plan.meta_models import build_meta_models as build_meta_models
from rlhf_pg.plan.shapes import shape_of as shape_of
from rlhf_pg.plan.show import job_of as job_of
from rlhf_pg.plan.show import paper_table as paper_table
from rlhf_pg.plan.show import said_beside as said_beside
from rlhf_pg.plan.throughput import Pace as Pace
from rlhf_pg.plan.throughput import Rates as Rates
from rlhf_pg.plan.throughput import measured_rates as measured_rates
from rlhf_pg.plan.throughput import predicted_pace as predicted_pace
