"""What is recorded of a step: numbers at their own rows and tokens, in the order of the prompts."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from rlhf_pg import GRPOTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import RunFiles
from tests.trainers.conftest import digits

RUN = {"max_steps": 2, "log_completions_steps": 1, "num_mini_batches": 2}


@pytest.fixture
def run(make) -> RunFiles:
    trainer = make(GRPOTrainer, micro_batch_tokens=24, beta=0.1, **RUN)
    trainer.train()
    return RunFiles(Path(trainer.args.output_dir))


def test_trace_has_the_order_of_the_prompts(run: RunFiles) -> None:
    """Ids, scores and advantages of each completion, computed from what readers see."""
    trace, tokens = run.traces[2], run.tokens(2)
    assert tokens is not None
    assert list(trace.prompt_index) == [4, 5, 6, 7]
    ends = tokens.lengths.cumsum()
    said = [one for one in run.completions if one["step"] == 2]
    assert trace.num_generations == 4
    for i, (one, end) in enumerate(zip(said, ends, strict=True)):
        ids = tokens.ids[end - tokens.lengths[i] : end].astype("<i4")
        assert trace.ids[i] == f"{zlib.crc32(ids.tobytes()):08x}"
        assert trace.rewards["digits"][i] == one["rewards/digits"]
        assert one["rewards/digits"] == pytest.approx(digits([one["completion"]])[0])
        mean = trace.advantages[i] / tokens.lengths[i]
        assert one["advantage"] == pytest.approx(mean, rel=1e-5, abs=1e-9)
        assert one["prompt_index"] == trace.prompt_index[i // 4]


def test_tokens_are_those_of_their_rows(make, monkeypatch) -> None:
    """Small micro-batches, in another order than the rows, put every number at its own token."""
    trainer = make(GRPOTrainer, micro_batch_tokens=24, beta=0.1, **RUN)
    trainer.records_all = True
    batch = trainer.collector.collect(0, Meter())
    experience, _ = trainer.make_experience(batch.rollout, batch.scores, Meter())
    log = trainer.recorder.watch(experience)
    expected = trainer.learner.score(batch.rollout).old_logprobs
    placed = log.placed(experience)
    for row in range(placed.num_rows):
        for _, part in trainer.learner.micro_batches(placed.select(placed.places[[15 - row]])):
            log.note(part, trainer.learner.trained(part))
    mask = batch.rollout.action_mask
    assert log.logprobs[mask].allclose(expected[mask], atol=1e-5)
    assert log.logprobs[~mask].isnan().all()


def test_kl_is_that_to_the_reference_before_the_update(run: RunFiles) -> None:
    """In the first step the policy is the reference; in the second it has moved."""
    first, second = run.tokens(1), run.tokens(2)
    assert first is not None
    assert second is not None
    assert abs(first.numbers["kl"]).max() < 1e-3
    assert abs(second.numbers["kl"]).max() > 1e-3


def test_weights_that_change_between_steps_are_named(make) -> None:
    trainer = make(GRPOTrainer, **RUN)
    trainer.records_all = True
    trainer.step(Meter())
    before = trainer.latest.trace
    trainer.step(Meter())
    assert trainer.latest.trace.altered == {}
    trainer.model.model.norm.weight.data[3] += 1e-6
    trainer.step(Meter())
    assert list(trainer.latest.trace.altered) == ["model.norm.weight"]
    assert before.weights != trainer.latest.trace.weights


def test_files_are_as_small_as_they_say(run: RunFiles) -> None:
    """6 bytes and its text for a token, 4 for the sampler's number, 2 for each other; 16 a row."""
    tokens = run.tokens(2)
    assert tokens is not None
    size = (run.directory / "tokens" / "step-00000002.safetensors").stat().st_size
    text = sum(len(said.encode()) for said in tokens.texts)
    numbers = 2 * (len(tokens.numbers) - 1) + 4
    content = len(tokens.ids) * (6 + numbers) + text + 16 * len(tokens.lengths)
    assert content <= size <= content + 2048  # the header
    assert set(tokens.numbers) == {
        *("advantage", "log_ratio", "reward", "kl", "entropy", "sampler_logprob")
    }
    assert np.isfinite(tokens.numbers["entropy"]).all()
