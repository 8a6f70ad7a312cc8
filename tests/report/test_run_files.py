"""Tokens of a step, written and read."""

import numpy as np
import pytest

from rlhf_pg.report.run_files import RunFiles, StepTokens, tokens_file


@pytest.mark.parametrize("texts", [[], [""], ["x" * 70_000, "日"]], ids=["none", "empty", "long"])
def test_tokens_are_read_as_they_were_written(tmp_path, texts: list[str]) -> None:
    """Completions may have no token, and bytes that are no text may be long in coming to an end."""
    count = len(texts)
    tokens = StepTokens(
        prompt_index=np.array([0]),
        sample=np.array([0], np.int32),
        lengths=np.array([count], np.int32),
        ids=np.arange(count, dtype=np.int32),
        action=np.ones(count, np.bool_),
        texts=texts,
        numbers={"advantage": np.zeros(count)},
    )
    tokens.save(tokens_file(tmp_path, 1))
    read = RunFiles(tmp_path).tokens(1)
    assert read is not None
    assert read.texts == texts
    assert read.lengths.tolist() == [count]
