"""Rows on disk: the record of a step, the batches ahead of a checkpoint, and what is replayed.

Shapes: N rows in the order prompt * n + sample, M their tokens, one row after another, K sources of
reward.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.data.rows import Row, sample_numbers

if TYPE_CHECKING:  # torch takes seconds, and a report does without
    from torch import Tensor

    from rlhf_pg.data.batch import Batch

Record = dict[str, Any]  # of a row: arrays of its tokens, and numbers
# What reading a file of tokens that is none may raise.
UNREADABLE = (
    OSError,
    SafetensorError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
)
OF_ROWS = (
    "prompt_index",
    "sample",
    "row",
    "rank",
    "truncated",
    "prompt_lengths",
    "lengths",
)
EXACT = (
    "advantage",
    "sampler_logprob",
)  # numbers that are not rounded to float16
NAMES = (
    "ids",
    "action",
    "offsets",
    "scores",
    "prompt_ids",
)  # of a record, beside its numbers


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The N completions of a step with their M tokens, one completion after another.

    `numbers` are NaN where the policy did not choose the token; only `EXACT` ones are not rounded
    to float16. The texts of a logged step join to the completions; a token that ends within a
    character has an empty text, and the next one has the character.
    """

    prompt_index: NDArray[np.int64]  # (N,)
    sample: NDArray[np.int32]  # (N,) sample number within the prompt
    row: NDArray[np.int64]  # (N,) row of the dataset
    rank: NDArray[np.int32]  # (N,) the process that trained on it
    truncated: NDArray[np.bool_]  # (N,)
    prompt_lengths: NDArray[np.int32]  # (N,); -1 for the same prompt as the completion before
    prompt_ids: NDArray[np.int32]  # one prompt after another
    lengths: NDArray[np.int32]  # (N,) tokens of each completion
    ids: NDArray[np.int32]  # (M,)
    action: NDArray[np.bool_]  # (M,) whether the policy chose the token
    score_at: NDArray[np.int64]  # (S,) indices of tokens with scores
    scores: NDArray[Any]  # (S,K); NaN where a source has none
    numbers: Mapping[str, NDArray[Any]]  # (M,) each, by name
    texts: Sequence[str] | None = None  # M
    offsets: NDArray[np.int32] | None = None  # (M,) as in `Batch`; None if all are sequences

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        blank: Record,
        texts_of: Callable[[list[int]], list[str]] | None = None,
    ) -> "StepTokens":
        """Put the records of rows one after another (`records_of`); `texts_of` returns a text for
        each token of a row.
        """

        def joined(name: str) -> Any:
            return np.concatenate([blank[name], *(record[name] for record in records)])

        def facts(name: str, dtype: Any) -> Any:
            return np.array([record[name] for record in records], dtype)

        prompts: list[Any] = []  # each once per run of equal ones
        prompt_lengths = []
        for record in records:
            prompt = record["prompt_ids"]
            length = -1
            if not prompts or not np.array_equal(prompt, prompts[-1]):
                prompts.append(prompt)
                length = len(prompt)
            prompt_lengths.append(length)
        scores = joined("scores")
        score_at = (~np.isnan(scores)).any(1).nonzero()[0]
        offsets = joined("offsets").astype(np.int32)
        prompt_index = facts("prompt_index", np.int64)
        texts = None
        if texts_of is not None:
            texts = []
            for record in records:
                texts += texts_of(record["ids"].astype(int).tolist())
        return cls(
            prompt_index=prompt_index,
            sample=np.array(sample_numbers(prompt_index.tolist()), np.int32),
            row=facts("row", np.int64),
            rank=facts("rank", np.int32),
            truncated=facts("truncated", np.bool_),
            prompt_lengths=np.array(prompt_lengths, np.int32),
            prompt_ids=np.concatenate([blank["prompt_ids"], *prompts]).astype(np.int32),
            lengths=np.array([len(record["ids"]) for record in records], np.int32),
            ids=joined("ids").astype(np.int32),
            action=joined("action").astype(np.bool_),
            score_at=score_at,
            scores=scores[score_at],
            numbers={name: joined(name) for name in blank if name not in NAMES},
            offsets=offsets if (offsets != 1).any() else None,
            texts=texts,
        )

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return some of the rows, without texts and columns."""
        prompts = self.prompts()
        starts = self.starts
        scores = self.dense_scores()
        logprobs = np.nan_to_num(self.numbers["sampler_logprob"])
        branches = None
        if "line" in self.numbers:
            branches = np.nan_to_num(self.numbers["line"]).astype(int)
        rows = []
        for i in indices:
            span = slice(starts[i], starts[i] + self.lengths[i])
            row = Row(
                prompt_ids=prompts[i],
                ids=self.ids[span].tolist(),
                logprobs=logprobs[span].tolist(),
                actions=self.action[span].tolist(),
                offsets=None if self.offsets is None else self.offsets[span].tolist(),
                branches=None if branches is None else branches[span].tolist(),
                scores=scores[span],
                truncated=bool(self.truncated[i]),
                group=int(self.prompt_index[i]),
                dataset_row=int(self.row[i]),
            )
            rows.append(row)
        return rows

    @property
    def starts(self) -> NDArray[np.int64]:
        """(N,) the index of the first token of each completion."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def dense_scores(self) -> NDArray[Any]:
        """Return the scores of all tokens, (M,K); NaN where there are none."""
        dense = np.full((len(self.ids), self.scores.shape[1]), np.nan)
        dense[self.score_at] = self.scores
        return dense

    def number(self, name: str) -> NDArray[Any]:
        """Return a number of all tokens; NaN if the record lacks it."""
        return self.numbers.get(name, np.full(len(self.ids), np.nan))

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each completion's prompt."""
        prompts: list[list[int]] = []
        end = 0
        for length in self.prompt_lengths.tolist():
            if length < 0:
                prompts.append(prompts[-1])
            else:
                prompts.append(self.prompt_ids[end : end + length].tolist())
                end += length
        return prompts

    def save(self, path: Path) -> None:
        """Write the file, which gets its name when it is complete."""
        tensors = {name: x for name, x in vars(self).items() if x is not None}
        numbers = tensors.pop("numbers")
        texts = tensors.pop("texts", None)
        for name, x in numbers.items():
            tensors[f"numbers.{name}"] = _exact(x) if name in EXACT else half(x)
        tensors["scores"] = _exact(self.scores)
        if texts is not None:
            encoded = [text.encode("utf-8", "replace") for text in texts]
            tensors["text"] = np.frombuffer(b"".join(encoded), np.uint8)
            lengths = [len(text) for text in encoded]  # rarely more than fit in a byte
            longest = max(lengths, default=0)
            tensors["text_lengths"] = np.array(lengths, np.min_scalar_type(longest))
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        write_file(path, [save(tensors)])

    @classmethod
    def load(cls, path: Path) -> "StepTokens":
        """Read a file from `save`."""
        stored = load_file(path)
        texts = None
        if "text" in stored:
            text = io.BytesIO(stored.pop("text").tobytes())
            lengths = stored.pop("text_lengths").tolist()
            texts = [text.read(length).decode("utf-8", "replace") for length in lengths]
        names = sorted(name for name in stored if name.startswith("numbers."))
        numbers = {name.removeprefix("numbers."): stored.pop(name) for name in names}
        record = cls(texts=texts, numbers=numbers, **stored)
        record.check()
        return record

    def check(self) -> None:
        """Refuse arrays that do not fit together (ValueError)."""
        total = len(self.ids)
        prompt_total = len(self.prompt_ids)
        sizes = {
            "ids": total,
            "action": total,
            "prompt_ids": prompt_total,
        }
        sizes |= dict.fromkeys(OF_ROWS, len(self.lengths))
        sizes["score_at"] = len(self.scores)
        arrays = {name: (getattr(self, name), size, "iub") for name, size in sizes.items()}
        for name, x in self.numbers.items():
            arrays[name] = (x, total, "f")
        if self.offsets is not None:
            arrays["offsets"] = (self.offsets, total, "i")
        for name, (x, size, kinds) in arrays.items():
            if x.shape != (size,) or x.dtype.kind not in kinds:
                raise ValueError(f"{name} is not an array of {size} numbers")
        if self.scores.ndim != 2 or (self.texts is not None and len(self.texts) != total):
            raise ValueError("scores or texts are not those of its tokens")
        opened = self.prompt_lengths.clip(0)
        for name, lengths, size in (
            ("lengths", self.lengths, total),
            ("prompt_lengths", opened, prompt_total),
        ):
            # As Python's numbers, whose sum does not overflow.
            if lengths.min(initial=0) < 0 or sum(lengths.tolist()) != size:
                raise ValueError(f"{name} do not add up to {size}")
        if (self.prompt_lengths[:1] < 0).any():
            raise ValueError("the first prompt is missing")
        if len(self.score_at) and not 0 <= self.score_at.min() <= self.score_at.max() < total:
            raise ValueError("score_at is beyond its tokens")


def records_of(
    batch: "Batch",
    numbers: "Mapping[str, Tensor]",
    dataset_rows: Sequence[int],
    rank: int = 0,
) -> tuple[list[Record], Record]:
    """Return a record of each row, with numbers (B,T), NaN where the policy chose nothing; and
    `blank`, with every array of a record and no token in it, for a step without rows.
    """
    columns = {
        "ids": batch.completion_ids,
        "action": batch.action_mask,
        "offsets": batch.all_offsets(),
        "scores": batch.scores,
    }
    for name, number in numbers.items():
        columns[name] = number.detach().masked_fill(~batch.action_mask, math.nan)
    arrays = {name: column.double().cpu().numpy() for name, column in columns.items()}
    prompts = batch.prompt_ids.cpu().numpy()
    groups = batch.groups.tolist()
    records = []
    for i, (length, prompt, truncated) in enumerate(batch.lengths().tolist()):
        record = {name: array[i, :length] for name, array in arrays.items()}
        record |= {
            "prompt_index": groups[i],
            "row": dataset_rows[i],
            "rank": rank,
            "truncated": truncated,
            "prompt_ids": prompts[i, prompts.shape[1] - prompt :],
        }
        records.append(record)
    blank = {name: array.reshape(-1, *array.shape[2:])[:0] for name, array in arrays.items()}
    return records, blank | {"prompt_ids": prompts.reshape(-1)[:0]}


def _exact(x: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as float32 if that is exact, else as float64."""
    single = x.astype(np.float32)
    if np.array_equal(single, x, equal_nan=True):
        return single
    return x.astype(np.float64)


def half(x: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as float16, clipped to its range."""
    clipped: NDArray[Any] = np.clip(x, -65504, 65504)
    return clipped.astype("<f2")
