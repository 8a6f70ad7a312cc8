"""What is said of a failure goes to a disk that is full. (Real failures: `tests/distributed`.)"""

import sys
import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from rlhf_pg.runtime.watchdog import Watch, broadcasts_failure


def hang(stream: str) -> None:
    watch = Watch(HashStore(), rank=0, world=1, timeout=0.1)
    with open("/dev/full", "w") as full, watch.waiting("gather"):
        full.write("a line")
        setattr(sys, stream, full)
        time.sleep(600)


@pytest.mark.fault(46, "a process that hangs still ends, though it cannot say why")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_hanging_process_exits_without_working_output(stream) -> None:
    process = get_context("fork").Process(target=hang, args=(stream,))
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 1


@pytest.mark.parametrize("stderr", ["full", "closed", "missing"])
def test_error_is_raised_and_shared_without_working_stderr(stderr, monkeypatch) -> None:
    store = HashStore()
    runtime = SimpleNamespace(watch=Watch(store, rank=0, world=1, timeout=60))
    stream = None if stderr == "missing" else Broken(OSError if stderr == "full" else ValueError)
    monkeypatch.setattr(sys, "stderr", stream)

    @broadcasts_failure
    def work(owner: SimpleNamespace) -> None:
        raise RuntimeError("the judge is down")

    with pytest.raises(RuntimeError, match="the judge is down"):
        work(SimpleNamespace(runtime=runtime))
    assert store.num_keys() == 2  # the failure, and that this process knows of it


class Broken:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def write(self, text: str) -> None:
        raise self.error("it cannot be written")
