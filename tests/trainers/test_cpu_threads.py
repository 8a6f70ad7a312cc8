"""`cpu_threads: auto`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rlhf_pg import GRPOConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.plan import cpu_threads
from rlhf_pg.plan.cpu_threads import Timed, fastest, passes, settled_threads
from rlhf_pg.replay.replay import Replay
from tests.trainers.conftest import make

__all__ = ["make"]
ALONE = SimpleNamespace(
    device=torch.device("cpu"), world=1, all_reduce_max=int, all_reduce_sum=lambda x: x
)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which nobody has said anything, with four cores."""
    for name in (*cpu_threads.TOLD, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Clock:
    """A clock that only the passes move, each by what it takes with the threads of the moment."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, times: float, seconds: dict[int, float]) -> Timed:
        def run() -> None:
            self.now += seconds[torch.get_num_threads()]

        return Timed(run, times)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu_threads.time, "perf_counter", clock)
    return clock


@pytest.mark.parametrize(
    ("decode", "packed", "expected"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.3}, {1: 1.0, 2: 0.6, 4: 0.3}, 4),
        ({1: 1.0, 2: 9.0, 4: 9.0}, {1: 1.0, 2: 0.5, 4: 0.3}, 1),  # small operations wait
        ({1: 0.1, 2: 0.2, 4: 0.9}, {1: 1.0, 2: 0.5, 4: 0.3}, 2),  # 3.3, 2.1, 3.6 in a step
        ({1: 1.0, 2: 0.95, 4: 0.91}, {1: 1.0, 2: 0.95, 4: 0.91}, 1),  # saves too little
    ],
)
def test_fastest_step_wins(clock: Clock, decode: Any, packed: Any, expected: int) -> None:
    timed = [clock.timed(3.0, decode), clock.timed(3.0, packed)]
    assert fastest([1, 2, 4], timed, ALONE) == expected


def test_one_slow_round_does_not_count(clock: Clock) -> None:
    """Another program takes the cores for a moment: with two threads a median is not moved."""
    turns = iter([9.0, 9.0] + [0.1] * 100)

    def run() -> None:
        clock.now += next(turns) if torch.get_num_threads() == 2 else 0.3

    with patch.object(cpu_threads, "SECONDS", 100.0):
        assert fastest([1, 2], [Timed(run, 1.0)], ALONE) == 2


def test_no_round_begins_after_a_second(clock: Clock) -> None:
    fastest([1, 2], [clock.timed(1.0, {1: 0.2, 2: 0.2})], ALONE)
    assert clock.now == pytest.approx(2 * 2 * 2 * 0.2)  # two rounds: the first ended at 0.8


def test_processes_choose_one_number_by_their_sum(clock: Clock) -> None:
    """Here two threads are faster, but the other process loses more than this one gains."""
    other = torch.tensor([1.0, 3.0], dtype=torch.float64)
    runtime = SimpleNamespace(all_reduce_max=int, all_reduce_sum=lambda own: own + other)
    assert fastest([1, 2], [clock.timed(1.0, {1: 1.0, 2: 0.5})], runtime) == 1


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers that are tried from here on, of which the least is chosen."""
    tried: list[list[int]] = []

    def choose(counts: list[int], *_: Any) -> int:
        tried.append(counts)
        return counts[0]

    monkeypatch.setattr(cpu_threads, "fastest", choose)
    monkeypatch.setattr(cpu_threads, "passes", lambda *_: [])
    return tried


@pytest.mark.parametrize(
    ("processes", "cores", "expected"),
    [("1", 4, [1, 2, 4]), ("2", 4, [1, 2]), ("1", 6, [1, 3, 6])],
)
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, processes: str, cores: int, expected: list[int]
) -> None:
    torch.set_num_threads(cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    tried = counted(monkeypatch)
    assert settled_threads(GRPOConfig(), None, ALONE, 4) == 1  # type: ignore[arg-type]
    assert tried == [expected]


@pytest.mark.parametrize("name", cpu_threads.TOLD)
def test_number_of_the_environment_is_kept(
    make: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    tried = counted(monkeypatch)
    assert make().resolved_args().cpu_threads == 4
    assert (torch.get_num_threads(), tried) == (4, [])


def test_single_thread_of_torch_leaves_nothing_to_try(make: Any, monkeypatch: Any) -> None:
    torch.set_num_threads(1)
    tried = counted(monkeypatch)
    assert make().threads == 1
    assert tried == []


def test_gpu_keeps_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, on_gpu = counted(monkeypatch), SimpleNamespace(device=torch.device("cuda"))
    assert settled_threads(GRPOConfig(), None, on_gpu, 4) == 4  # type: ignore[arg-type]
    assert tried == []


def test_given_number_is_taken(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # the config is closer
    trainer = make(cpu_threads=3)
    assert (trainer.threads, torch.get_num_threads()) == (3, 3)


def test_trainer_goes_by_a_measurement(make: Any) -> None:
    """The real passes run, and leave neither gradients nor another mode behind."""
    tried: list[int] = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        tried.append(torch.get_num_threads())
        return {1: 3.0, 2: 1.0, 4: 2.0}[torch.get_num_threads()]

    with patch.object(cpu_threads, "_seconds", seconds):
        trainer = make(max_steps=1)
    assert set(tried) == {1, 2, 4}
    assert (trainer.threads, torch.get_num_threads()) == (2, 2)
    policy = trainer.learner.policy
    assert not policy.training
    assert all(p.grad is None for p in policy.parameters())
    trainer.train()
    path = Path(trainer.args.output_dir) / "config.yaml"
    assert parse(GRPOConfig, ["--config", str(path)]).cpu_threads == 2


def test_passes_add_up_to_a_step(make: Any) -> None:
    """4 groups of a prompt of 6 tokens and 4 completions of 6, alone and on two processes."""
    trainer = make()
    policy, args = trainer.learner.policy, trainer.args
    for processes, groups in ((1, 4), (2, 2)):
        decoded, packed = passes(args, policy, processes, 6)
        assert decoded.times == 6  # all rows at once, token by token
        assert packed.times == cpu_threads.PASSES * groups


def test_large_model_is_timed_on_fewer_tokens(make: Any) -> None:
    policy, args = (trainer := make()).learner.policy, trainer.args
    with patch.object(cpu_threads, "WORK", 0):  # then 16 tokens at a time
        decoded, packed = passes(args, policy, 1, 6)
        assert decoded.times == 6
        assert packed.times == pytest.approx(cpu_threads.PASSES * 4 * 30 / 12)  # with one row
        decoded, _ = passes(GRPOConfig(max_completion_length=6), policy, 1, 6)
    assert decoded.times == 6 * 16 * 8 / 16


@pytest.mark.parametrize(("given", "expected"), [("auto", 2), (3, 3)])
def test_resumed_run_keeps_threads_unless_given(make: Any, given: Any, expected: int) -> None:
    with patch.object(cpu_threads, "fastest", lambda *_: 2):
        make(max_steps=1, save_steps=1).train()
    with patch.object(cpu_threads, "fastest", lambda *_: 4):
        second = make(max_steps=2, cpu_threads=given)
    second.train(resume_from_checkpoint=True)
    assert second.threads == torch.get_num_threads() == expected
    assert second.checkpointer.config["cpu_threads"] == expected


def test_run_takes_its_own_threads_beside_another_trainer(make: Any, tmp_path: Path) -> None:
    first = make(cpu_threads=2, max_steps=1)
    make(cpu_threads=1, output_dir=str(tmp_path / "other"))
    first.train()
    assert torch.get_num_threads() == 2


def test_replay_takes_threads_of_the_run(make: Any) -> None:
    with patch.object(cpu_threads, "fastest", lambda *_: 2):
        make(max_steps=2).train()
    with patch.object(cpu_threads, "fastest", lambda *_: 1):
        again = Replay(make(max_steps=2))
    assert again.trainer.threads == torch.get_num_threads() == 2
    assert again.make(2).differs == []


@pytest.mark.parametrize("value", ["most", 1.5, None])
def test_bad_cpu_threads_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cpu_threads must be int or one of 'auto', got"):
        GRPOConfig(cpu_threads=value)
