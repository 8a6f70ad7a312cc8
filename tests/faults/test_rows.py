"""Every fault is shown by a test."""

from tests.faults.rows import ROWS
from tests.test_docs import generate


def test_every_fault_is_tested() -> None:
    assert {number for number, *_ in generate.fault_tests()} == ROWS.keys()
