"""Users' code beside the run."""

import os
from multiprocessing import get_context

import pytest

from rlhf_pg.boundary.user_code import call_concurrently
from rlhf_pg.data.template_bounds import bounded


def beside() -> int:
    return int(call_concurrently(20, lambda: 7).result())


@pytest.mark.fault(48, "threads that a run has begun are begun again in a fork")
@pytest.mark.parametrize("called", [beside, lambda: bounded(lambda: 7)], ids=["beside", "bounded"])
def test_call_in_a_fork_has_threads_of_its_own(called) -> None:
    assert called() == 7
    fork = get_context("fork").Process(target=lambda: os._exit(called()))
    fork.start()
    fork.join(20)
    fork.kill()
    fork.join()
    assert fork.exitcode == 7
