"""One process and two (gloo) sample the same, and take the same updates."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pg.metrics import read
from rlhf_pg.tasks import arithmetic

RUNS = Path(__file__).with_name("runs.py")
ROOT = RUNS.parents[2]
ALGORITHMS: dict[str, dict[str, Any]] = {
    # 5 prompts on 2 processes, minibatches of 3 and 2: shares are uneven, and one is a single row.
    # The reference follows the policy.
    "grpo": {
        "num_generations": 4,
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
    # Groups of two are often equal: each process alone would draw again for others.
    "rloo": {
        "num_generations": 2,
        "prompts_per_step": 6,
        "micro_batch_tokens": 40,
        "dynamic_sampling_rounds": 2,
        "skip_zero_advantages": True,
        "beta": 0.0,
        "normalize_rewards": True,
    },
    # Shares as uneven as can be, several updates per step, and a step that stops before the last;
    # a critic that begins alone, in units that all processes share.
    "ppo": {
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "num_iterations": 3,
        "target_kl": 1e-3,
        "beta": 0.05,
        "missing_eos_penalty": 0.5,
        "overlong_buffer": 3,
        "whiten_rewards": True,
        "vf_coef": 0.5,
        "normalize_values": True,
        "value_pretraining_steps": 1,
    },
    # One prompt: the second process has none.
    "reinforce": {
        "num_generations": 4,
        "prompts_per_step": 1,
        "advantage_estimator": "returns_minus_greedy",
    },
}


@dataclass
class Outcome:
    sampled: list[list[int]]
    gradient: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    metrics: list[dict[str, Any]]
    evaluated: dict[str, float]
    exchanges: list[int]


def launch(out: Path, processes: int, config: dict[str, Any]) -> Outcome:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    arguments = [str(RUNS), str(out), str(out / "config.json")]
    subprocess.run([*command, *arguments], env=env, check=True, timeout=300)
    sampled = [row for r in range(processes) for row in read_json(out / f"sampled-{r}.json")]
    return Outcome(
        sampled=sorted(sampled),
        metrics=read(out / "run" / "metrics.jsonl"),
        evaluated=read_json(out / "eval.json"),
        exchanges=read_json(out / "exchanges.json"),
        **torch.load(out / "tensors.pt", weights_only=True),
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def outcomes(request, tmp_path_factory) -> tuple[Outcome, Outcome]:
    """The same config on one process and on two."""
    root = tmp_path_factory.mktemp(request.param)
    config = config_of(request.param, root)
    return launch(root / "one", 1, config), launch(root / "two", 2, config)


def config_of(algorithm: str, root: Path) -> dict[str, Any]:
    """The options of `ALGORITHMS` on a model saved in the directory."""
    torch.manual_seed(0)
    model, tokenizer = arithmetic().new_model()
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return {
        "algorithm": algorithm,
        "model": str(root / "model"),
        "max_steps": 5,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "max_completion_length": 6,
        **ALGORITHMS[algorithm],
    }


def test_sampled_ids_are_equal(outcomes) -> None:
    one, two = outcomes
    assert one.sampled == two.sampled
    assert len({tuple(row) for row in one.sampled}) > len(one.sampled) / 2  # no repeated noise


def test_the_first_gradient_is_equal(outcomes) -> None:
    one, two = outcomes
    assert one.gradient.norm() > 0
    assert (one.gradient - two.gradient).norm() <= 1e-5 * one.gradient.norm()


def test_five_steps_end_at_the_same_weights(outcomes) -> None:
    one, two = outcomes
    assert (one.end - two.end).norm() <= 1e-4 * (one.end - one.start).norm()


def test_logged_numbers_are_equal(outcomes) -> None:
    one, two = outcomes
    for line, other in zip(one.metrics, two.metrics, strict=True):
        assert numbers(line) == pytest.approx(numbers(other), rel=1e-3, abs=1e-7)
    assert one.evaluated == pytest.approx(two.evaluated)


def test_gradients_are_exchanged_once_per_update(outcomes) -> None:
    """However many micro-batches there are, each bucket of gradients travels once."""
    _, two = outcomes
    assert two.exchanges
    assert len(two.exchanges) == len(set(two.exchanges))


def test_steps_are_stopped_alike(outcomes) -> None:
    """Whether a step stops is decided on the KL of all: a rank alone would wait for the others."""
    one, two = outcomes
    updates = [line["num_updates"] for line in one.metrics]
    assert updates == [line["num_updates"] for line in two.metrics]
    if "value_loss" in one.metrics[0]:  # PPO, with a target for the KL: not every step makes all 6
        assert min(updates) < 6


def test_groups_are_kept_by_the_scores_of_all(outcomes) -> None:
    one, two = outcomes
    if "sampling/rounds" in one.metrics[0]:
        kept = [line["sampling/kept_fraction"] for line in one.metrics]
        assert kept == [line["sampling/kept_fraction"] for line in two.metrics]
        assert min(kept) < 1
        groups = sorted({row[0] for row in one.sampled})
        assert groups == sorted({row[0] for row in two.sampled}) == [0, 1, 2, 3, 4, 5]


def test_a_step_in_which_no_row_trains_is_taken_all_the_same(tmp_path) -> None:
    """All rows were cut off: both processes still wait for the same gradients, which are 0."""
    config = config_of("ppo", tmp_path) | {
        "max_completion_length": 1,
        "overlong_buffer": 1,
        "mask_truncated_completions": True,
        "value_pretraining_steps": 0,
        "max_steps": 1,
        "seed": 1,
    }
    outcome = launch(tmp_path / "two", 2, config)
    assert [line["completions/clipped_ratio"] for line in outcome.metrics] == [1.0]
    assert outcome.gradient.equal(torch.zeros_like(outcome.gradient))
    assert outcome.start.equal(outcome.end)


@pytest.mark.parametrize(("vf_coef", "moves"), [(0.0, False), (0.5, True)])
def test_the_critic_moves_by_its_loss_alone(tmp_path, vf_coef, moves) -> None:
    plain = {"normalize_values": False, "value_pretraining_steps": 0, "vf_coef": vf_coef}
    outcome = launch(tmp_path / "two", 2, config_of("ppo", tmp_path) | plain)
    head = 128 + 1
    size = (len(outcome.start) - head) // 2  # the policy, whose head is its embeddings, comes first
    critic = [weights[size:] for weights in (outcome.start, outcome.end)]
    assert not outcome.start[:size].equal(outcome.end[:size])
    assert critic[0].equal(critic[1]) != moves


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """What was computed, and does not depend on the clock."""
    clock = ("step_time", "time/", "perf/")
    return {k: v for k, v in line.items() if v is not None and not k.startswith(clock)}
