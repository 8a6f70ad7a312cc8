"""Mistakes in the estimates of memory and time."""

from tests.mutants import Mutant

TEST = "tests/plan/test_paper.py::"
THREADS = "tests/trainers/test_cpu_threads.py::"

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
    Mutant(
        name="threads-by-the-mean",
        mistake="a moment in which others had the cores decides on threads for a whole run",
        target="rlhf_pg.plan.cpu_threads.fastest",
        old="quantile(0.5, dim=1)",
        new="mean(dim=1)",
        killers=(f"{THREADS}test_one_slow_round_does_not_count",),
    ),
    Mutant(
        name="threads-by-large-operations",
        mistake="decoding, whose operations are small and many, is timed as if it were one token",
        target="rlhf_pg.plan.cpu_threads.passes",
        old="width * groups * count / together",
        new="groups * count / together",
        killers=(f"{THREADS}test_passes_add_up_to_a_step",),
    ),
    Mutant(
        name="threads-of-the-own-process",
        mistake="every process takes the threads that suit itself, so sums round differently",
        target="rlhf_pg.plan.cpu_threads.fastest",
        old="runtime.all_reduce_sum(medians @ times)",
        new="(medians @ times)",
        killers=(f"{THREADS}test_processes_choose_one_number_by_their_sum",),
    ),
    Mutant(
        name="threads-of-all-cores-in-every-process",
        mistake="processes of one machine have as many threads each as it has cores",
        target="rlhf_pg.plan.cpu_threads.settled_threads",
        old="torch.get_num_threads() // sharing",
        new="torch.get_num_threads()",
        killers=(f"{THREADS}test_processes_of_a_machine_share_its_cores",),
    ),
    Mutant(
        name="resumed-with-other-threads",
        mistake="a resumed run measures anew, and goes on with sums in another order",
        target="rlhf_pg.trainers.setup.TrainerSetup.on_resume",
        old='self.threads = saved["cpu_threads"]',
        new="pass",
        killers=(
            f"{THREADS}test_resumed_run_keeps_threads_unless_given",
            f"{THREADS}test_replay_takes_threads_of_the_run",
        ),
    ),
    Mutant(
        name="plan-forgets-offload",
        mistake="the copy of a model that is measured recomputes from the GPU's memory",
        target="rlhf_pg.plan.footprint.blueprint",
        old="checkpoint_activations(part, offloads(part))",
        new="checkpoint_activations(part)",
        killers=("tests/plan/test_plan.py::test_offload_plans_no_inputs_of_layers_on_gpu",),
    ),
    Mutant(
        name="plan-offloads-on-a-cpu",
        mistake="on a CPU activations are taken for offloaded, as if it had another memory",
        target="rlhf_pg.plan.meta_models.build_meta_models",
        old="args = args.on(kind)",
        new="pass",
        killers=("tests/plan/test_plan.py::test_offload_plans_no_inputs_of_layers_on_gpu",),
    ),
]
