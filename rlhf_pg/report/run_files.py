"""The files that a run leaves behind: config, numbers, completions, tokens and traces of steps.

Beside `config.yaml` and `metrics.jsonl` a run directory has

- `trace.jsonl`, from which two runs can be compared step by step, and a step that is made again can
  be checked. Every process group that begins or resumes the run adds a line (`Start`), and every
  step one more (`Trace`).
- `completions.jsonl`, every completion of each `log_completions_steps`-th step, for readers.
- `tokens/step-00000010.safetensors`, the tokens of these completions with numbers (`StepTokens`).

Shapes: P prompts of a step over all processes, N their completions in the order prompt * n +
sample, M the tokens of all completions, one completion after another.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

METRICS, COMPLETIONS, TRACE, OUTSIDE = (
    *("metrics.jsonl", "completions.jsonl", "trace.jsonl", "outside.jsonl"),
)
TOKENS = "tokens"
TRACES_KEPT = 4  # that were asked for last
# Safe, and ten times as fast where libyaml is there.
FAST_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The numbers of a token, in the order in which they are shown; a run has those that it computes.
COLUMNS = {
    "advantage": "advantage of the token, as the loss has it",
    "reward": "what the token is paid: scores of the steps that end there, less the KL penalty",
    "log_ratio": "log-probability in the step's last update less that with which it was sampled",
    "kl": "log-probability before the update less the reference's (k1)",
    "entropy": "entropy of the policy's distribution, in nats",
    "value": "the critic's value of what stands before the token, in its own units",
    "sampler_logprob": "log-probability with which it was sampled",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """A beginning of a run, or of its continuation: what it ran on, and its weights by then.

    Attributes:
        step: the steps that were taken before.
        versions: of Python and of the packages, by name.
        processes: how many there are.
        backend: DDP, FSDP2, ZeRO-2 and so on.
        device: name of the accelerator, or "cpu" with the kind of processor.
        data: fingerprint of the rows of the data in any order; None of a stream.
        rewards: fingerprint of the source of each reward function, by name; None if unknown.
        weights: fingerprint of each tensor of the models, by name; those of a critic begin with
            "critic.".
    """

    step: int
    versions: Mapping[str, str]
    processes: int
    backend: str
    device: str
    data: str | None = None
    rewards: Mapping[str, str | None] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that a step did, in numbers that differ where it differed.

    Attributes:
        step: counted from 1.
        prompt_index: (P,) the running number of each prompt, which keys its noise.
        rows: (P,) the row of the dataset.
        prompts: (N,) CRC-32 of the prompt's ids, in hexadecimal.
        ids: (N,) CRC-32 of the completion's ids.
        logprobs: (N,) sum of the log-probabilities with which it was sampled.
        rewards: (N,) raw total score of each source, by name; None where it does not apply.
        advantages: (N,) sum of the advantages of its tokens.
        values: (N,) sum of the critic's values, if there is one.
        weights: fingerprint of each tensor after the update, in the order of the latest `Start`.
        altered: those of tensors that were no longer as the step before had left them, by name.
    """

    step: int
    prompt_index: Sequence[int]
    rows: Sequence[int]
    prompts: Sequence[str]
    ids: Sequence[str]
    logprobs: Sequence[float | None]
    rewards: Mapping[str, Sequence[float | None]]
    advantages: Sequence[float | None]
    values: Sequence[float | None] | None = None
    weights: Sequence[str] = ()
    altered: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_generations(self) -> int:
        """The completions of each prompt."""
        return len(self.ids) // max(1, len(self.rows))


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """The tokens of the N completions of a step, one completion after another.

    Attributes:
        prompt_index, sample: (N,) which completions they are.
        lengths: (N,) how many tokens each has.
        ids: (M,).
        action: (M,) bool, whether the policy chose the token.
        texts: M texts, which together are the completions; a token that ends within a character has
            an empty one, and the next has the character.
        numbers: (M,) each, by the names in `COLUMNS`; NaN where not known.
    """

    prompt_index: NDArray[np.int64]
    sample: NDArray[np.int32]
    lengths: NDArray[np.int32]
    ids: NDArray[np.int32]
    action: NDArray[np.bool_]
    texts: list[str]
    numbers: dict[str, NDArray[Any]]

    def save(self, path: Path) -> None:
        """Write the file: for each token 6 bytes, its text, 4 for `sampler_logprob` and 2 for each
        other number, which is rounded to float16; and 16 bytes for each completion.
        """
        texts = [text.encode("utf-8", "replace") for text in self.texts]
        lengths = [len(text) for text in texts]  # seldom more than a byte has room for
        numbers = {f"numbers.{name}": _stored(name, x) for name, x in self.numbers.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"partial-{path.name}")
        tensors = {
            "prompt_index": self.prompt_index.astype(np.int64),
            "sample": self.sample.astype(np.int32),
            "lengths": self.lengths.astype(np.int32),
            "ids": self.ids.astype(np.int32),
            "action": self.action.astype(np.bool_),
            "text": np.frombuffer(b"".join(texts), np.uint8),
            "text_lengths": np.array(lengths, np.min_scalar_type(max(lengths, default=0))),
            **numbers,
        }
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "StepTokens":
        """Read a file that `save` wrote.

        Raises:
            ValueError: it has a tensor that is no list of numbers.
        """
        stored = load_file(path)
        if any(tensor.ndim != 1 for tensor in stored.values()):
            raise ValueError(f"{path} has a tensor that is no list of numbers")
        ends = np.cumsum(stored.pop("text_lengths").astype(np.int64)).tolist()
        text = stored.pop("text").tobytes()
        starts = [0, *ends][:-1]
        texts = [text[a:b].decode("utf-8", "replace") for a, b in zip(starts, ends, strict=True)]
        numbers = {
            name.removeprefix("numbers."): stored.pop(name)
            for name in sorted(stored)
            if name.startswith("numbers.")
        }
        return cls(texts=texts, numbers=numbers, **stored)


def _stored(name: str, numbers: NDArray[Any]) -> NDArray[Any]:
    if name == "sampler_logprob":
        return numbers.astype(np.float32)
    largest = float(np.finfo(np.float16).max)
    return np.clip(numbers.astype(np.float64), -largest, largest).astype(np.float16)


@dataclass(frozen=True)
class RunFiles:
    """The directory of a run, of which any file may be missing."""

    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty if there is none."""
        file = self.directory / "config.yaml"
        if not file.is_file():
            return {}
        return yaml.load(file.read_text(), Loader=FAST_YAML) or {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The line of each step."""
        return whole_lines(self.directory / METRICS)

    @cached_property
    def completions(self) -> list[dict[str, Any]]:
        """The completions of logged steps."""
        return whole_lines(self.directory / COMPLETIONS)

    @cached_property
    def starts(self) -> list[Start]:
        """The beginnings of the run: one, and another each time it was resumed."""
        # They are few among long lines: only those that may be one are read as JSON.
        lines = whole_lines(self.directory / TRACE, having=b'"versions"')
        return [Start(**line) for line in lines if "versions" in line]

    @cached_property
    def traces(self) -> "Traces":
        """The trace of each step."""
        return Traces(self.directory / TRACE)

    def logged_steps(self) -> list[int]:
        """Return the steps whose tokens are kept, in order."""
        files = (self.directory / TOKENS).glob("step-" + "[0-9]" * 8 + ".safetensors")
        return sorted(int(file.stem.removeprefix("step-")) for file in files)

    def tokens(self, step: int) -> StepTokens | None:
        """Return the tokens of a step; None if they are not kept, or cannot be read."""
        try:
            return StepTokens.load(tokens_file(self.directory, step))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None


class Traces(Mapping[int, Trace]):
    """The traces of a file, each made of its line when it is asked for.

    As lines, those of a long run take a tenth of the memory.
    """

    def __init__(self, path: Path) -> None:
        self._lines: dict[int, bytes] = {}
        self._newest: dict[int, Trace] = {}
        if not path.is_file():
            return
        with path.open("rb") as file:
            for line in file:
                for record in records_in(line):
                    if "versions" not in record:
                        self._lines[record["step"]] = line

    def __getitem__(self, step: int) -> Trace:
        if step not in self._newest:
            trace = Trace(**json.loads(self._lines[step]))
            while len(self._newest) >= TRACES_KEPT:
                self._newest.pop(next(iter(self._newest)))
            self._newest[step] = trace
        return self._newest[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, step: object) -> bool:
        return step in self._lines


def tokens_file(directory: Path, step: int) -> Path:
    """Return the place of the tokens of a step."""
    return directory / TOKENS / f"step-{step:08d}.safetensors"


def whole_lines(path: Path, having: bytes = b"") -> list[dict[str, Any]]:
    """Read the JSON objects of a file, without a last line that is being written.

    Args:
        having: only lines with these bytes.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [record for line in file for record in records_in(line, having)]


def records_in(content: bytes, having: bytes = b"") -> list[dict[str, Any]]:
    """Return the JSON objects of lines that have a step."""
    records = []
    for line in content.splitlines():
        if having not in line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
