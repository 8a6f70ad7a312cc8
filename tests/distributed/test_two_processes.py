"""What two processes do together, apart from giving the same update (tests/distributed/
test_invariance.py): they exchange no more than they must, and take every decision as one.
"""

import pytest
import torch

from rlhf_pg.report.run_files import read
from tests.distributed.launching import COMMON, PATIENCE, Outcome, launch, saved_model, start_two
from tests.distributed.layouts import JOBS
from tests.distributed.runs import SPLITS

pytestmark = pytest.mark.distributed

PLAIN = {
    "algorithm": "ppo",
    "prompts_per_step": 5,
    "num_mini_batches": 2,
    "num_iterations": 3,
    "target_kl": 1e-3,
}
EPISODES = JOBS["rloo"] | {"environment": True, "max_turns": 2}
CASES = {
    "ppo": JOBS["ppo"],
    "rloo": JOBS["rloo"],
    # All rows are cut off, so none trains.
    "no row": PLAIN
    | {
        "max_completion_length": 1,
        "overlong_buffer": 1,
        "mask_truncated_completions": True,
        "max_steps": 1,
        "seed": 1,
    },
    "idle critic": PLAIN | {"vf_coef": 0.0},
    "trained critic": PLAIN | {"vf_coef": 0.5},
    "episodes": EPISODES,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("two")
    common = {"model": saved_model(root / "model"), **COMMON, "micro_batch_tokens": SPLITS["two"]}
    jobs = {name: common | case for name, case in CASES.items()}
    return launch(root / "runs", jobs, processes=2)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_reduced_once_per_update(outcomes, case) -> None:
    """However many micro-batches there are, each gradient travels once."""
    parameters, *gradients = outcomes[case].exchanges
    assert len(gradients) == parameters


def test_target_kl_stops_updates_on_all_ranks(outcomes) -> None:
    """It is decided on the KL of all: a rank alone would wait for the others."""
    updates = [line["num_updates"] for line in outcomes["ppo"].metrics]
    assert min(updates) < 6


def test_two_ranks_resample_groups_without_spread(outcomes) -> None:
    outcome = outcomes["rloo"]
    assert min(line["sampling/kept_fraction"] for line in outcome.metrics) < 1
    assert sorted({row[0] for row in outcome.sampled}) == [0, 1, 2, 3, 4, 5]


def test_step_without_trained_rows_leaves_weights_unchanged(outcomes) -> None:
    """Both processes still wait for the same gradients, which are 0."""
    outcome = outcomes["no row"]
    assert [line["completions/clipped_ratio"] for line in outcome.metrics] == [1.0]
    assert outcome.gradients["all"].equal(torch.zeros_like(outcome.start))
    assert outcome.start.equal(outcome.end)


@pytest.mark.parametrize(("case", "moves"), [("idle critic", False), ("trained critic", True)])
def test_critic_moves_only_with_value_loss(outcomes, case, moves) -> None:
    outcome = outcomes[case]
    head = 128 + 1
    size = (len(outcome.start) - head) // 2  # the policy, whose head is its embeddings, comes first
    critic = [weights[size:] for weights in (outcome.start, outcome.end)]
    assert not outcome.start[:size].equal(outcome.end[:size])
    assert critic[0].equal(critic[1]) != moves


def test_episodes_match_single_process(outcomes, tmp_path) -> None:
    """Some of which fail, in one process or in the other."""
    job = COMMON | EPISODES | {"model": saved_model(tmp_path / "model"), "micro_batch_tokens": 1000}
    one, two = launch(tmp_path / "run", {"one": job})["one"], outcomes["episodes"]
    assert one.sampled == two.sampled
    norm = one.gradients["all"].norm()
    assert norm > 0
    assert (one.gradients["all"] - two.gradients["all"]).norm() <= 1e-4 * norm
    assert sum(line["episodes/failed"] for line in two.metrics) > 0
    assert max(line["episodes/turns"] for line in two.metrics) > 1
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert a["episodes/failed"] == b["episodes/failed"]
        assert a["episodes/turns"] == b["episodes/turns"]
        assert a["reward"] == pytest.approx(b["reward"], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("grpo", {"kl_adaptive_lr": 0.01}),  # which is measured after the updates, before saving
        ("ppo", {}),
    ],
)
def test_layers_kept_whole_match_one_process(tmp_path, algorithm, options) -> None:
    own = {"model": saved_model(tmp_path / "model"), "gradients": False, "save_steps": 1}
    jobs = {"run": COMMON | JOBS[algorithm] | own | options}
    one = launch(tmp_path / "one", jobs)["run"]
    kept = launch(tmp_path / "kept", jobs, "fsdp2_kept", 2)["run"]
    assert (kept.end - one.end).norm() <= 1e-4 * (one.end - one.start).norm()
    assert [line["grad_norm"] for line in kept.metrics] == pytest.approx(
        [line["grad_norm"] for line in one.metrics], rel=1e-4
    )


def test_no_rows_and_no_characters_are_gathered() -> None:
    """A rank that raised on the way to the others would leave them waiting."""
    for process in start_two("tests.distributed.gathering", [[], []]):
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        expected = r"'rank 1: no character: \ud800 \xe9\x00'"
        assert f"[0, 3] slice(0, 0, None) {expected}" in said


@pytest.mark.parametrize(
    ("backend", "how"),
    [("fsdp2", "all weights"), ("fsdp2", "with LoRA"), ("zero3", "with LoRA")],
)
def test_sharded_weights_reach_vllm_one_by_one_in_every_step(tmp_path, backend, how) -> None:
    arguments = [how, backend, str(tmp_path)]
    for process in start_two("tests.distributed.starting_vllm", [arguments] * 2, backend):
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
    steps = read(tmp_path / "metrics.jsonl")
    assert len(steps) == 3
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-4


@pytest.mark.parametrize("engine", ["vllm", "auto"])
def test_engine_that_does_not_start_ends_processes_that_wait_for_it(engine) -> None:
    """In seconds, of a `ddp_timeout` of 600."""
    arguments = [engine, "ddp", ""]
    for process in start_two("tests.distributed.starting_vllm", [arguments] * 2):
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, said
        assert "OutOfMemoryError: 2 GiB" in said
