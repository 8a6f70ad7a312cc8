"""Sampled completions of several rounds, joined."""

from rlhf_pg.data.records import Rollout
from rlhf_pg.trainers.samples import Samples


def samples(count: int, **columns: list) -> Samples:
    """Completions of one token each, one per prompt."""
    rollout = Rollout.from_tokens(
        prompts=[[1]] * count,
        completions=[[2]] * count,
        logprobs=[[0.0]] * count,
        truncated=[False] * count,
        groups=list(range(count)),
        pad_token_id=0,
    )
    return Samples(
        rollout=rollout,
        prompts=["p"] * count,
        completions=["c"] * count,
        completion_ids=[[2]] * count,
        columns=columns,
        rows=list(range(count)),
    )


def test_column_that_a_round_lacks_is_none_in_its_rows() -> None:
    parts = [samples(2, a=[1, 2]), samples(1, b=[3]), samples(0)]
    assert Samples.concat(parts, 0).columns == {"a": [1, 2, None], "b": [None, None, 3]}
