"""Prompts of a stream: their order by number, what is kept, and what is refused."""

import pytest
from datasets import IterableDataset

from rlhf_pg.data.chat import encode
from rlhf_pg.data.stream import PromptStream
from rlhf_pg.tasks.tiny import character_tokenizer

TOKENIZER = character_tokenizer("0123456789")


def stream(prompts, seed=0, buffer=5, drop=False, longest=3):
    data = IterableDataset.from_generator(
        lambda: ({"prompt": p, "n": i} for i, p in enumerate(prompts))
    )
    return PromptStream(
        data,
        lambda row, i: encode(row["prompt"], TOKENIZER, i, most=longest),
        longest,
        drop,
        seed,
        buffer,
    )


def numbers(prompts, rows):
    return prompts.columns(rows)["n"]


def test_each_epoch_has_every_row_in_a_new_order_of_the_seed():
    prompts = [str(i) for i in range(10)]
    epochs = [numbers(stream(prompts), range(10 * e, 10 * e + 10)) for e in range(2)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert numbers(stream(prompts), range(20)) == epochs[0] + epochs[1]
    assert numbers(stream(prompts, seed=1), range(10)) != epochs[0]
    assert numbers(stream(prompts, buffer=0), range(20)) == [*range(10), *range(10)]


def test_rows_are_the_same_however_they_are_asked_for():
    prompts = [str(i) for i in range(10)]
    whole = numbers(stream(prompts), range(25))
    later = stream(prompts)
    assert numbers(later, [20, 24, 22]) == [whole[20], whole[24], whole[22]]
    later.forget_before(24)
    assert list(later._kept) == [24]
    assert numbers(later, [3]) == [whole[3]]


def test_long_prompts_are_dropped_and_counted_or_refused_with_their_row(caplog):
    prompts = ["1", "1234", "2"]
    assert numbers(stream(prompts, buffer=0, drop=True), range(8)) == [0, 2] * 4
    assert [record.message for record in caplog.records] == [
        "prompts of the stream that are too long are dropped",
        "dropped 1 of the stream's 3 prompts: too long",
    ]
    said = "prompt in row 1 is too long.*long_prompts to drop"
    with pytest.raises(ValueError, match=f"^train_dataset: .*{said}"):
        numbers(stream(prompts, buffer=0), range(4))
    with pytest.raises(ValueError, match=r"^train_dataset, rows in their shuffled order: "):
        numbers(stream(prompts), range(4))


@pytest.mark.parametrize("prompts", [[], ["12345"]])
def test_stream_without_prompts_raises(prompts):
    with pytest.raises(ValueError, match="the stream has no prompts"):
        stream(prompts, drop=True).reach(0)


def test_fingerprint_tells_data_and_order_apart():
    ten = [str(i) for i in range(10)]
    own = stream(ten).fingerprint
    assert stream(ten).fingerprint == own
    others = [stream(ten[::-1]), stream(ten, seed=1), stream([*ten[:9], "8"])]
    assert own not in {other.fingerprint for other in others}
