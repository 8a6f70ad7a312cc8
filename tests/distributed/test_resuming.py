"""A run goes on under another backend and another number of processes, where it stopped."""

import pytest
import torch

from tests.distributed import layouts
from tests.distributed.launching import COMMON, launch, saved_model
from tests.distributed.layouts import ONE, Layout

pytestmark = pytest.mark.distributed

STEP = "checkpoints/step-00000003"
# A critic in units of its own, a reference that moves, and batches that are sampled ahead.
AHEAD = {"algorithm": "reinforce", "num_generations": 2, "prompts_per_step": 5}
AHEAD |= {"num_mini_batches": 2, "policy_loss": "clipped_surrogate"}
AHEAD |= {"advantage_estimator": "returns_minus_greedy"}
JOBS = layouts.JOBS | {"ahead": AHEAD | {"rollout_ahead": 2, "rollout_workers": 1}}
RESUMED = ["ppo", "grpo", "ppo, LoRA", "ahead"]
LAYOUTS = [Layout("ddp", 2), Layout("fsdp2", 2), Layout("zero2", 2), Layout("zero3", 2)]


@pytest.fixture(scope="module")
def common(tmp_path_factory) -> dict:
    model = saved_model(tmp_path_factory.mktemp("model") / "model")
    return {"model": model, **COMMON, "save_steps": 3, "gradients": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, common) -> dict:
    """One process, never interrupted."""
    jobs = {name: common | JOBS[name] for name in RESUMED}
    return launch(tmp_path_factory.mktemp("whole") / "one", jobs)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def there_and_back(request, tmp_path_factory, common, whole) -> tuple[dict, dict]:
    """Begun in one process and finished in the layout, and the other way round."""
    layout, root = request.param, tmp_path_factory.mktemp("resumed")

    def resumed(outcomes: dict) -> dict:
        return {
            name: common | JOBS[name] | {"resume": str(outcomes[name].directory / STEP)}
            for name in RESUMED
        }

    finished = resumed(whole)
    begun = {f"{name}, begun": common | JOBS[name] for name in RESUMED}
    there = launch(root / "there", finished | begun, layout.backend, layout.processes)
    started = {name: there[f"{name}, begun"] for name in RESUMED}
    return there, launch(root / "back", resumed(started), ONE.backend, ONE.processes)


@pytest.mark.fault(18, "the same data and noise; it ends within 1e-4 of the distance moved")
@pytest.mark.parametrize("way", [0, 1], ids=["there", "back"])
@pytest.mark.parametrize("job", RESUMED)
def test_run_resumed_on_other_layout_matches_uninterrupted_run(
    there_and_back, whole, job, way
) -> None:
    resumed, expected = there_and_back[way][job], whole[job]
    assert [line["step"] for line in resumed.metrics] == [4, 5]
    moved = (expected.end - expected.start).norm()
    assert (resumed.end - expected.end).norm() <= 1e-4 * moved
    for line, other in zip(expected.numbers()[3:], resumed.numbers(), strict=True):
        assert other == pytest.approx(line, rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory, common) -> dict:
    """In bfloat16 under ZeRO-3: never interrupted, and resumed after three steps."""
    root, job = tmp_path_factory.mktemp("narrow"), common | JOBS["ppo"] | {"dtype": "bfloat16"}
    whole = launch(root / "whole", {"ppo": job}, "zero3", 2)
    job = job | {"resume": str(whole["ppo"].directory / STEP)}
    return {"whole": whole["ppo"]} | launch(root / "rest", {"rest": job}, "zero3", 2)


def test_float32_master_weights_resume_bit_for_bit(narrow) -> None:
    """A bfloat16 weight alone has lost what its updates added below the last bit."""
    assert narrow["rest"].end.equal(narrow["whole"].end)
    assert narrow["rest"].start.dtype == torch.bfloat16
    assert not narrow["whole"].end.equal(narrow["whole"].start)
