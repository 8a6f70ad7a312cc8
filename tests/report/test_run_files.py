"""The record of a step, written and read."""

import pytest

from rlhf_pg.report.run_files import RunFiles, tokens_file
from tests.report.synthetic import tokens_of


@pytest.mark.parametrize("texts", [[], [""], ["x" * 70_000, "日"]], ids=["none", "empty", "long"])
def test_tokens_are_read_as_they_were_written(tmp_path, texts: list[str]) -> None:
    """Completions may have no token, and bytes that are no text may be long in coming to an end."""
    count = len(texts)
    numbers = {"advantage": [0.0] * count}
    tokens_of([(0, 0)], [count], range(count), texts, numbers).save(tokens_file(tmp_path, 1))
    read = RunFiles(tmp_path).tokens(1)
    assert read is not None
    assert read.texts == texts
    assert read.lengths.tolist() == [count]
