"""Batches sampled ahead by older weights: which ones, by rule alone, and what a stop leaves."""

import dataclasses
import hashlib
import json
import random
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf_pg import GRPOTrainer, ReinforceTrainer
from rlhf_pg.data import Batch
from rlhf_pg.report.metrics import Meter
from tests.rows import tensors
from tests.trainers.conftest import digits
from tests.untimed import untimed

LUCK = random.SystemRandom()  # a trainer seeds the others
AHEAD = {"rollout_ahead": 1, "rollout_workers": 1, "max_steps": 4, "learning_rate": 1e-2}


def digest(trainer: Any) -> str:
    own = [p.detach().numpy().tobytes() for p in trainer.learner.module.parameters()]
    return hashlib.sha256(b"".join(own)).hexdigest()


def slow_digits(completions: list[str], **_: Any) -> list[float]:
    time.sleep(LUCK.random() / 10)
    return digits(completions)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("depth", [1, 2])
def test_batch_is_sampled_by_the_weights_of_its_rule(make, depth: int) -> None:
    """Step n trains on samples of the weights after step n - depth, or of the first ones."""
    trainer = make(GRPOTrainer, **AHEAD | {"rollout_ahead": depth, "dtype": "float64"})
    weights, gaps = [], []

    def learn(batch: Any, meter: Any) -> Any:
        weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        step, now = trainer.state.step, weights[-1]
        for n, old in ((max(0, step - depth), 0), (step, 1)):
            trainer.model.load_state_dict(weights[n], strict=False)
            scored = trainer.learner.infer(batch).old_logprobs
            if scored is None:
                scored = trainer.learner.backend(batch).logprobs
            gap = (scored - batch.sampler_logprobs).abs()[batch.action_mask].max()
            gaps.append((step, old, float(gap)))
        trainer.model.load_state_dict(now, strict=False)
        return real(batch, meter)

    real, trainer.learn = trainer.learn, learn
    trainer.train()
    for step, now, gap in gaps:
        assert (gap < 1e-10) == (not now or step == 0)
    assert [line["sampling/staleness"] for line in trainer.history] == [
        min(step, depth) for step in range(4)
    ]
    assert trainer.history[0]["sampling/effective_sample_size"] == pytest.approx(1)
    assert all(line["sampling/effective_sample_size"] < 1 for line in trainer.history[1:])


@pytest.mark.usefixtures("warm_workers")
def test_batch_that_was_dropped_is_not_trained_on(make, tmp_path: Path) -> None:
    """An interrupted run goes on in the same process: what was under way is sampled anew."""
    whole = make(output_dir=str(tmp_path / "whole"), **AHEAD)
    whole.train()
    trainer = make(output_dir=str(tmp_path / "run"), reward_funcs=slow_digits, **AHEAD)
    step, interrupted = trainer.step, []

    def interrupt() -> Any:
        if trainer.state.step == 2 and not interrupted:
            interrupted.append(trainer.ahead.next(2, 8, 4, Meter()))
            raise KeyboardInterrupt
        return step()

    trainer.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint="latest")
    assert trainer.recorder.fingerprints(trained=True) == whole.recorder.fingerprints(trained=True)


@pytest.mark.usefixtures("warm_workers")
def test_adapter_is_sampled_with_whether_merged_or_not(make) -> None:
    """In bfloat16 a young adapter would be lost in the merged weights, so it is computed beside."""
    options = {"dtype": "bfloat16", "use_peft": True, "learning_rate": 1e-5}
    trainer = make(**AHEAD | options)
    trainer.train()
    assert len(trainer.sampler.engine.pickled) == 2  # merged while B is 0, and then not
    assert all(line["agreement/kl"] < 1e-3 for line in trainer.history)


@pytest.mark.slow
def test_neither_workers_nor_delays_change_a_bit(make, tmp_path: Path) -> None:
    runs = []
    for workers in (1, 2, 3):
        directory = tmp_path / str(workers)
        options = AHEAD | {"rollout_workers": workers, "num_iterations": 2}
        trainer = make(reward_funcs=slow_digits, output_dir=str(directory), **options)
        trainer.train()
        runs.append((digest(trainer), untimed(directory)))
    assert runs[0] == runs[1] == runs[2]


def of_first_release(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint of 0.1.0's first weeks held: padded tensors, and lists for JSON."""
    columns = tensors(batch)
    names = ("prompts", "completions", "dataset_rows", "logged")
    totals = ("num_prompts", "other_tokens", "metrics", "logged_metrics")
    lists = {name: getattr(batch, name) for name in (*names, *totals)} | {"episodes": []}
    if batch.greedy is not None:
        of_greedy, lists["greedy"] = of_first_release(batch.greedy)
        columns |= {f"greedy.{name}": column for name, column in of_greedy.items()}
    return columns, lists


@pytest.mark.usefixtures("warm_workers")
def test_batches_of_earlier_checkpoints_are_read(make, tmp_path: Path) -> None:
    """As those of new ones, with the greedy completions and what rewards logged."""

    def logs(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("text", completions)
        return digits(completions)

    greedy = {"advantage_estimator": "returns_minus_greedy", "reward_funcs": logs}
    trainer = make(ReinforceTrainer, **AHEAD | greedy)
    expected = trainer.ahead.next(0, 0, 4, Meter())
    assert expected.greedy is not None
    places = [tmp_path / "new", tmp_path / "old"]
    for place in places:
        place.mkdir()
    trainer.ahead.drain()
    trainer.ahead.save(places[0], 0, 0)
    facts = json.loads((places[0] / "ahead-rank0.json").read_text())
    columns = {}
    for i, (fact, job) in enumerate(zip(facts, trainer.ahead.queue, strict=True)):
        own, fact["batch"] = of_first_release(job.done.result()[0])
        columns |= {f"{i}.{name}": column.contiguous() for name, column in own.items()}
    save_file(columns, places[1] / "ahead-rank0.safetensors")
    (places[1] / "ahead-rank0.json").write_text(json.dumps(facts))
    for place in places:
        trainer.ahead.restore(place)
        batch = trainer.ahead.queue[0].done.result()[0]
        for now, before in ((batch, expected), (batch.greedy, expected.greedy)):
            for name, value in tensors(before).items():
                found = getattr(now, name)
                assert found.dtype == value.dtype
                assert torch.equal(found.nan_to_num(7.0), value.nan_to_num(7.0)), name
            for row, other in zip(now.rows, before.rows, strict=True):
                row = dataclasses.replace(row, scores=None)
                assert row == dataclasses.replace(other, actions=[True] * len(other.ids))
        assert batch.logged == expected.logged
        assert batch.num_prompts == expected.num_prompts


@pytest.mark.usefixtures("warm_workers")
def test_batch_that_was_shared_out_anew_is_saved_with_its_own_texts(make, tmp_path: Path) -> None:
    """Rows of two processes are not in the order of their prompts."""
    trainer = make(GRPOTrainer, **AHEAD)
    trainer.ahead.next(0, 0, 4, Meter())
    trainer.ahead.drain()
    batch = trainer.ahead.queue[0].done.result()[0]
    groups = batch.groups.tolist()
    odd_first = sorted(range(len(groups)), key=lambda i: groups[i] % 2 == 0)
    done: Future[Any] = Future()
    done.set_result((batch.pick(odd_first, num_prompts=batch.num_prompts), 4, {}))
    trainer.ahead.queue[0] = dataclasses.replace(trainer.ahead.queue[0], done=done)
    trainer.ahead.save(tmp_path, 0, 0)
    trainer.ahead.restore(tmp_path)
    again = trainer.ahead.queue[0].done.result()[0]
    assert again.groups.tolist() == [groups[i] for i in odd_first]
    for row in again.rows:
        assert row.completion == trainer.sampler.player.texts("", row.ids)[1]
