"""Every fault is shown by a test, or explained."""

from tests.faults.rows import ROWS, UNSHOWN
from tests.test_docs import generate


def test_every_fault_is_tested_or_explained() -> None:
    shown = {number for number, *_ in generate.fault_tests()}
    assert shown <= ROWS.keys()
    assert shown | UNSHOWN.keys() == ROWS.keys()
    assert not shown & UNSHOWN.keys()
