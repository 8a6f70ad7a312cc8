"""The records that travel: padding, cutting to size, and splitting into micro-batches."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlhf_pg.data import Batch, Row
from rlhf_pg.data.batch import to_device
from rlhf_pg.data.rows import sample_numbers
from tests.rows import batch_of, tensors

PAD = 0


def rollout(prompts=((1,), (2, 3, 4), (5, 6)), completions=((7, 8), (1,), (2, 3, 4)), **options):
    return batch_of(
        prompts,
        completions,
        logprobs=[[-0.25 * (i + 1)] * len(row) for i, row in enumerate(completions)],
        truncated=[i % 2 == 1 for i in range(len(prompts))],
        groups=[10 + i for i in range(len(prompts))],
        **options,
    )


def experience(**numbers):
    base = rollout()
    advantages = torch.arange(9.0).view(3, 3)
    return base.with_columns(**{"advantages": advantages, **numbers})


def test_prompts_are_padded_left_and_completions_right():
    r = rollout()
    assert r.prompt_ids.tolist() == [[PAD, PAD, 1], [2, 3, 4], [PAD, 5, 6]]
    assert r.prompt_mask.int().tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]
    assert r.completion_ids.tolist() == [[7, 8, PAD], [1, PAD, PAD], [2, 3, 4]]
    assert r.completion_mask.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert r.action_mask.equal(r.completion_mask)
    assert r.sampler_logprobs.tolist() == [[-0.25, -0.25, 0], [-0.5, 0, 0], [-0.75] * 3]
    assert r.truncated.tolist() == [False, True, False]
    assert r.groups.tolist() == [10, 11, 12]
    assert (r.num_rows, r.width, r.num_tokens) == (3, 6, 12)
    assert r.token_lists() == [[7, 8], [1], [2, 3, 4]]


def test_real_token_equal_to_pad_is_unmasked():
    r = rollout(prompts=((PAD, 1), (2,), (3,)), completions=((1, PAD), (PAD,), (2, 3)))
    assert r.prompt_mask.sum(dim=1).tolist() == [2, 1, 1]
    assert r.completion_mask.sum(dim=1).tolist() == [2, 1, 2]
    assert r.action_mask.equal(r.completion_mask)


def test_empty_completions_and_no_rows_keep_two_dimensions():
    assert rollout(completions=((), (), ())).completion_ids.tolist() == [[PAD]] * 3
    assert not rollout(completions=((), (), ())).completion_mask.any()
    nothing = rollout(prompts=(), completions=())
    assert nothing.completion_ids.shape == nothing.prompt_ids.shape == (0, 1)
    assert nothing.micro_batches(100) == []
    counted = nothing.with_counts()
    assert counted.host_rows == ()
    assert counted.with_counts() is counted
    assert counted.predicted_slots().tolist() == []
    assert counted.select(torch.tensor([], dtype=torch.int64)).num_rows == 0


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("logprobs", [-0.5]),
        ("actions", [True] * 3),
        ("offsets", [1]),
        ("branches", []),
        ("rewards", []),
    ],
)
def test_numbers_of_other_tokens_raise(name, numbers):
    with pytest.raises(ValueError, match=f"{name} .* per token"):
        Row(**{"prompt_ids": [1], "ids": [2, 3], "logprobs": [-0.5, -0.6], name: numbers})


def test_rows_of_another_mask_are_counted_anew():
    batch = batch_of([[1]], [[2, 3]]).with_counts()
    other = batch.with_columns(action_mask=torch.tensor([[True, False]]))
    assert other.predicted_slots().tolist() == other.with_counts().predicted_slots().tolist() == [0]


def test_action_mask_has_holes_at_environment_tokens():
    r = batch_of(
        [[1], [1]],
        [[2, 3, 4], [5, PAD]],
        logprobs=[[-0.5, 0.0, -1.5], [-2.5, -3.5]],
        actions=[[True, False, True], [False, True]],
    )
    assert r.completion_mask.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert r.action_mask.int().tolist() == [[1, 0, 1], [0, 1, 0]]
    assert r.sampler_logprobs.tolist() == [[-0.5, 0, -1.5], [-2.5, -3.5, 0]]


def test_select_keeps_order_and_trims_common_padding():
    r = rollout().select(torch.tensor([2, 0]))
    assert r.prompt_ids.tolist() == [[5, 6], [PAD, 1]]
    assert r.prompt_mask.int().tolist() == [[1, 1], [0, 1]]
    assert r.completion_ids.tolist() == [[2, 3, 4], [7, 8, PAD]]
    assert r.groups.tolist() == [12, 10]
    short = rollout().select(torch.tensor([1, 0]))
    assert short.completion_ids.tolist() == [[1, PAD], [7, 8]]
    assert short.sampler_logprobs.tolist() == [[-0.5, 0], [-0.25, -0.25]]
    assert short.truncated.tolist() == [True, False]


def test_select_keeps_non_action_tokens():
    tool_output_last = dataclasses.replace(
        rollout(), action_mask=torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0]]).bool()
    )
    r = tool_output_last.select(torch.tensor([0, 1]))
    assert r.completion_ids.tolist() == [[7, 8], [1, PAD]]
    assert r.action_mask.int().tolist() == [[1, 0], [1, 0]]


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 8), min_size=1, max_size=4),
        st.lists(st.tuples(st.integers(0, 8), st.floats(-9, 0, width=32)), max_size=4),
        st.booleans(),
        st.integers(0, 99),
    ),
    max_size=3,
)


def of_rows(rows):
    return batch_of(
        [prompt for prompt, *_ in rows],
        [[token for token, _ in said] for _, said, *_ in rows],
        logprobs=[[logprob for _, logprob in said] for _, said, *_ in rows],
        truncated=[truncated for *_, truncated, _ in rows],
        groups=[group for *_, group in rows],
    )


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(ROWS, min_size=1, max_size=3))
def test_concat_equals_record_of_all_rows(parts):
    together = Batch.concat([of_rows(rows) for rows in parts])
    at_once = tensors(of_rows([row for rows in parts for row in rows]))
    assert together.host_rows is None
    for name in at_once:
        value = getattr(together, name)
        assert value.dtype == at_once[name].dtype
        assert value.equal(at_once[name]), name


def test_concat_pads_experience_tensors():
    short = experience(values=torch.arange(9.0).view(3, 3) + 20).select(torch.tensor([1, 0]))
    e = Batch.concat([short, experience(values=torch.ones(3, 3))])
    assert short.advantages.tolist() == [[3, 4], [0, 1]]
    assert e.values.tolist() == [[23, 24, 0], [20, 21, 0], *[[1, 1, 1]] * 3]
    assert e.prompt_mask.int().tolist()[:2] == [[1, 1, 1], [0, 0, 1]]
    assert e.completion_ids.tolist()[:2] == [[1, PAD, PAD], [7, 8, PAD]]
    assert e.old_logprobs is None


def test_concat_fills_tensors_that_a_part_lacks():
    """As a text of PPO-ptx lacks what was measured of completions."""
    scores = torch.ones(3, 3, 2)
    scored = experience(scores=scores, totals=torch.ones(3, 2), end_values=torch.ones(3))
    e = Batch.concat([scored, rollout()])
    assert e.advantages[3:].tolist() == [[0, 0, 0]] * 3
    assert e.scores[3:].isnan().all()
    assert e.totals[3:].isnan().all()
    assert e.end_values.tolist() == [1, 1, 1, 0, 0, 0]
    assert e.blank_row().totals.shape == (1, 2)


def test_offsets_are_padded_as_sequences():
    tree = rollout(offsets=((1, 2), (4,), (1, 1, 0)))
    assert tree.parent_offsets.tolist() == [[1, 2, 1], [4, 1, 1], [1, 1, 0]]
    short, plain = tree.select(torch.tensor([1, 0])), rollout(offsets=((1, 1), (1,), (1, 1, 1)))
    assert plain.parent_offsets is None
    for parts in ([short, plain], [plain, short]):
        together, offsets = Batch.concat(parts), [[4, 1, 1], [1, 2, 1]]
        own = slice(2) if parts[0] is short else slice(3, 5)
        assert together.parent_offsets[own].tolist() == offsets
        assert int((together.parent_offsets != 1).sum()) == 2
    assert tree.blank_row().parent_offsets.tolist() == [[1]]


def test_blank_row_has_attended_tokens_but_no_actions():
    record = experience(returns=torch.ones(3, 3))
    blank = record.blank_row()
    assert blank.num_rows == 1
    assert blank.prompt_mask.tolist() == [[True]]
    assert blank.completion_mask.tolist() == [[True]]
    assert blank.action_mask.tolist() == [[False]]
    for name, value in tensors(record).items():
        shape = (1,) if name in ("groups", "truncated") else (1, 1)
        assert getattr(blank, name).shape == shape
        assert getattr(blank, name).dtype == value.dtype
        if name not in ("prompt_mask", "completion_mask"):
            assert not getattr(blank, name).any()


def test_adjacent_rows_with_same_group_and_prompt_are_family():
    r = rollout(prompts=[[1], [1], [2, 1], [1], [1]], completions=[[2]] * 5)
    r = dataclasses.replace(r, groups=torch.tensor([5, 5, 5, 5, 6]))
    assert r.shared_prefixes().tolist() == [0, 0, 1, 2, 3]
    assert r.longest == 3
    garbage = torch.where(r.prompt_mask, r.prompt_ids, torch.arange(10).view(5, 2))
    assert dataclasses.replace(r, prompt_ids=garbage).shared_prefixes().tolist() == [0, 0, 1, 2, 3]


def test_rows_beyond_window_are_split_by_padded_size():
    r = rollout(prompts=[[1] * 6] * 4, completions=[[2] * 3, [2] * 2, [2], [2] * 2])
    r = dataclasses.replace(r, groups=torch.zeros(4, dtype=torch.int64))
    assert [b.tolist() for b in r.micro_batches(14)] == [[0, 1, 3, 2]]
    assert [b.tolist() for b in r.micro_batches(14, window=8)] == [[1, 3, 2], [0]]
    assert [b.tolist() for b in r.micro_batches(14, window=7)] == [[2], [0], [1], [3]]


def test_lengths_count_real_tokens():
    r = rollout(prompts=((PAD, 1), (2,), (3,)), completions=((1, PAD), (PAD,), (2, 3, 4)))
    assert r.lengths().tolist() == [[2, 2, 0], [1, 1, 1], [3, 1, 0]]
    assert r.lengths().dtype == torch.int64


def test_counted_rows_match_masks():
    r = rollout(prompts=[[1], [1], [2, 1]], completions=[[2], [3, 4], [5]])
    own = r.completion_mask & (r.completion_ids != 3)
    r = dataclasses.replace(r, groups=torch.tensor([7, 7, 8]), action_mask=own).with_counts()
    rows = [(row.family, row.prompt, row.completion, row.predicted) for row in r.host_rows]
    assert rows == [(0, 1, 1, 1), (0, 1, 2, 1), (1, 2, 1, 1)]
    plain = dataclasses.replace(r, host_rows=None)
    assert r.predicted_slots().tolist() == plain.predicted_slots().tolist() == [0, 3, 4]
    picked = torch.tensor([2, 0])
    one, other = r.select(picked), plain.select(picked)
    assert one.host_rows == (r.host_rows[2], r.host_rows[0])
    for name, value in tensors(other).items():
        assert getattr(one, name).equal(value), name
    assert one.longest == other.longest == 3


def test_copy_to_cuda_is_non_blocking(monkeypatch):
    """There is no GPU here: what is asked of torch is what counts."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: asked.append((a, k)))
    to_device(torch.ones(1), torch.device("cuda"))
    assert asked == [((torch.device("cuda"),), {"non_blocking": True})]


def test_rows_of_a_group_are_numbered_in_their_order():
    assert sample_numbers([5, 5, 3, 5, 3]) == [0, 1, 0, 2, 1]
    assert sample_numbers([]) == []


def test_column_that_a_part_lacks_is_none_in_its_rows():
    def part(*columns):
        rows = [Row(prompt_ids=[1], ids=[2], logprobs=[0.0], columns=x) for x in columns]
        return Batch.of(rows)

    parts = [part({"a": 1}, {"a": 2}), part({"b": 3}), part()]
    assert Batch.concat(parts).columns == {"a": [1, 2, None], "b": [None, None, 3]}


def test_pick_keeps_texts_columns_and_scores_of_rows():
    batch = rollout().with_columns(scores=torch.arange(18.0).view(3, 3, 2))
    texts = [
        dataclasses.replace(row, prompt=prompt, columns={"x": x})
        for row, prompt, x in zip(batch.rows, "abc", (1, 2, 3), strict=True)
    ]
    batch = batch.with_columns(rows=texts)
    picked = batch.pick([2, 1], groups=torch.tensor([0, 1]))
    assert picked.prompts == ["c", "b"]
    assert picked.columns == {"x": [3, 2]}
    assert picked.groups.tolist() == [0, 1]
    assert picked.completion_ids.tolist() == [[2, 3, 4], [1, PAD, PAD]]
    assert picked.scores.equal(batch.scores[[2, 1]])
    assert picked.episodes == []


def test_trees_are_measured_on_the_host():
    """Branches from a prompt's end and its first token, and a beginning of its own."""
    tree = rollout(offsets=((1, 2), (3,), (1, 1, 0))).with_counts()
    jumps = [((1, 2),), ((0, 3),), ((2, 0),)]
    assert [row.jumps for row in tree.host_rows] == jumps
    assert [row.longest for row in tree.host_rows] == [2, 3, 4]
    assert [row.paths for row in tree.host_rows] == [2, 2, 2]
    mixed = Batch.concat([tree.select(torch.tensor([2])), rollout()]).with_counts()
    assert [row.longest for row in mixed.host_rows] == [4, 3, 4, 5]
    assert [row.paths for row in mixed.host_rows] == [2, 1, 1, 1]


def test_rows_keep_what_rewards_and_records_read():
    """Scores of recorded rows, lines of agents, texts and what functions logged."""
    rows = [
        Row(
            prompt_ids=[1],
            ids=[2, 3],
            logprobs=[0.0, 0.0],
            branches=[0, 1],
            scores=torch.tensor([[torch.nan], [5.0]]),
            completion="a",
            dataset_row=7,
            logged={"note": "x"},
        ),
        Row(
            prompt_ids=[1],
            ids=[4],
            logprobs=[0.0],
            scores=torch.tensor([[6.0]]),
            completion="b",
            dataset_row=8,
            actions=[False],
        ),
    ]
    batch = Batch.of(rows, sources=1)
    assert batch.scores[0, 1, 0] == 5
    assert batch.scores[1, 0, 0] == 6
    assert batch.scores.isnan().sum() == 2
    assert batch.branches.tolist() == [[0, 1], [0, 0]]
    assert batch.completions == ["a", "b"]
    assert batch.dataset_rows == [7, 8]
    assert batch.logged == {"note": ["x", None]}
    assert batch.all_offsets().tolist() == [[1, 1], [1, 1]]
    tree = rollout(offsets=((1, 2), (4,), (1, 1, 0)))
    assert tree.all_offsets() is tree.parent_offsets
    assert [row.is_judged for row in rows] == [True, False]
