"""Estimates of a run's memory before anything is loaded."""

from rlhf_pg.plan.memory import Memory as Memory
from rlhf_pg.plan.memory import MetaModels as MetaModels
from rlhf_pg.plan.memory import build_meta_models as build_meta_models
from rlhf_pg.plan.memory import predicted_memory as predicted_memory
