"""Mistakes in the estimates of memory and time."""

from tests.mutants import Mutant

TEST = "tests/plan/test_paper.py::"

MUTANTS = [
    Mutant(
        name="plan-prompts-once-per-completion",
        mistake="the plan counts a prompt for every completion, as if none were shared",
        target="rlhf_pg.plan.learning.tokens_of",
        old="return TokenCounts(real + job.groups * p, pairs, real)",
        new="return TokenCounts(real + len(lengths) * p, pairs, real)",
        killers=(f"{TEST}test_tokens_by_hand",),
    ),
    Mutant(
        name="plan-backward-as-forward",
        mistake="the plan counts an update's backward pass as one forward pass",
        target="rlhf_pg.plan.paper.learner_seconds",
        old="passes = (2 + job.trained + recomputes) * job.epochs",
        new="passes = (1 + job.trained + recomputes) * job.epochs",
        killers=(f"{TEST}test_passes_per_update",),
    ),
    Mutant(
        name="plan-gathers-once",
        mistake="the plan exchanges split weights once per update, not once per micro-batch",
        target="rlhf_pg.plan.learning.exchanges",
        old="return learnt * (2 + job.trained) + batches * scores",
        new="return job.updates * (2 + job.trained) + batches * scores",
        killers=(f"{TEST}test_exchanges_by_hand",),
    ),
    Mutant(
        name="plan-waiting-rows-are-free",
        mistake="rows that do not fit are sampled all the same, at no cost",
        target="rlhf_pg.plan.job.positions",
        old="while waiting and len(active) < room:",
        new="while waiting:",
        killers=(f"{TEST}test_positions_match_loop",),
    ),
]
