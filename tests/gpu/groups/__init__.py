"""The groups of checks, what is least sure first: each has its share of an hour."""

from tests.gpu.check import Group
from tests.gpu.groups import correctness, imports, memory, runs, times, unsure

GROUPS = {
    "imports": Group(imports.imports, minutes=2),
    "bfloat16": Group(unsure.bfloat16, minutes=5),
    "decoding": Group(unsure.decoding, minutes=5),
    "memory": Group(memory.memory, minutes=6),
    "flex": Group(unsure.flex, minutes=6),
    "float32": Group(correctness.float32, minutes=3),
    "sampling": Group(correctness.sampling, minutes=2),
    "resuming": Group(correctness.resuming, minutes=4),
    "steps": Group(times.steps, minutes=10, limit=240),
    "rollouts": Group(times.rollouts, minutes=6),
    "recipes": Group(runs.recipes, minutes=8),
    "presets": Group(runs.presets, minutes=5),
    "backends": Group(runs.backends, minutes=8, limit=240),
    "vllm": Group(runs.vllm, minutes=8, limit=240),
}
