"""The files that a run leaves behind, and the record of a step.

Beside `config.yaml` and `metrics.jsonl` a run directory has

- `trace.jsonl`: a line for every beginning of the run (`Start`), every step and every checkpoint.
- `tokens/step-00000010.safetensors`: the completions that a step trained on (`StepTokens`).
- `completions.jsonl`: every completion of each `log_completions_steps`-th step, for readers.

Shapes: N completions of a step over all processes in the order prompt * n + sample, M their tokens,
one completion after another, K sources of reward.
"""

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

METRICS, COMPLETIONS, TRACE = "metrics.jsonl", "completions.jsonl", "trace.jsonl"
TOKENS = "tokens"
EXACT = ("advantage", "sampler_logprob")  # numbers that are not rounded to float16
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
ALSO = ("tokenizers", "safetensors", "numpy", "deepspeed", "vllm", "bitsandbytes")
# Keys of a config that say where things are, not how the run learns.
PLACES = {
    *("output_dir", "resume_from_checkpoint", "run_name", "report_to", "logging_steps"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "save_steps", "save_total_limit"),
    *("num_completions_to_print", "log_completions_steps", "vllm_server_base_url", "ddp_timeout"),
    "vllm_sync_directory",
}
# Safe, and ten times as fast where libyaml is there.
FAST_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A beginning of a run, or of its continuation: what it ran on, and its weights by then.

    Attributes:
        step: the steps that were taken before.
        versions: of Python and of the packages, by name.
        processes: how many there are.
        backend: DDP, FSDP2, ZeRO-2 and so on.
        device: name of the accelerator, or "cpu" with the kind of processor.
        data: fingerprint of the rows of the data in any order.
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
class StepTokens:
    """The N completions of a step with their M tokens, one completion after another.

    Attributes:
        prompt_index, sample: (N,) which completions they are.
        row: (N,) of the dataset.
        rank: (N,) the process that trained on it.
        truncated: (N,) bool.
        prompt_lengths, prompt_ids: tokens of the prompts, one prompt after another; a completion
            whose prompt is that of the completion before has none of its own, and length -1.
        lengths: (N,) tokens of each completion.
        ids: (M,).
        action: (M,) bool, whether the policy chose the token.
        score_at, scores: (S,) tokens with scores, and the scores (S,K); NaN for none of a source.
        numbers: (M,) each, by name; NaN where the policy did not choose the token. "advantage" and
            "sampler_logprob" are exact; others, in logged steps, are rounded to float16.
        texts: M texts in a logged step, which together are the completions; a token that ends
            within a character has an empty one, and the next has the character.
    """

    prompt_index: NDArray[np.int64]
    sample: NDArray[np.int32]
    row: NDArray[np.int64]
    rank: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    prompt_lengths: NDArray[np.int32]
    prompt_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    ids: NDArray[np.int32]
    action: NDArray[np.bool_]
    score_at: NDArray[np.int64]
    scores: NDArray[Any]
    numbers: Mapping[str, NDArray[Any]]
    texts: Sequence[str] | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        """(N,) the first token of each completion."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each completion's prompt."""
        prompts: list[list[int]] = []
        end = 0
        for length in self.prompt_lengths.tolist():
            own = prompts[-1] if length < 0 else self.prompt_ids[end : end + length].tolist()
            prompts.append(own)
            end += max(0, length)
        return prompts

    def save(self, path: Path) -> None:
        """Write the file, which gets its name when it is whole."""
        tensors = dict(vars(self))
        numbers, texts = tensors.pop("numbers"), tensors.pop("texts")
        tensors |= {f"numbers.{name}": _rounded(name, column) for name, column in numbers.items()}
        tensors["scores"] = _exact(self.scores)
        if texts is not None:
            encoded = [text.encode("utf-8", "replace") for text in texts]
            lengths = [len(text) for text in encoded]  # seldom more than a byte has room for
            tensors["text"] = np.frombuffer(b"".join(encoded), np.uint8)
            tensors["text_lengths"] = np.array(lengths, np.min_scalar_type(max(lengths, default=0)))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"partial-{path.name}")
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "StepTokens":
        """Read a file that `save` wrote.

        Raises:
            OSError, SafetensorError, KeyError, TypeError: there is none, or it is another's.
        """
        stored = load_file(path)
        texts = None
        if "text" in stored:
            text = stored.pop("text").tobytes()
            ends = np.cumsum(stored.pop("text_lengths").astype(np.int64)).tolist()
            starts = [0, *ends][:-1]
            texts = [
                text[a:b].decode("utf-8", "replace") for a, b in zip(starts, ends, strict=True)
            ]
        names = sorted(name for name in stored if name.startswith("numbers."))
        numbers = {name.removeprefix("numbers."): stored.pop(name) for name in names}
        return cls(texts=texts, numbers=numbers, **stored)


def _exact(x: NDArray[Any]) -> NDArray[Any]:
    """Return numbers in float32, if that has all of them."""
    single = x.astype(np.float32)
    return single if np.array_equal(single, x, equal_nan=True) else x.astype(np.float64)


def _rounded(name: str, x: NDArray[Any]) -> NDArray[Any]:
    largest = float(np.finfo(np.float16).max)
    return _exact(x) if name in EXACT else np.clip(x, -largest, largest).astype(np.float16)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of a step; complete on the main process alone.

    Attributes:
        trace: the line for trace.jsonl: step, prompts taken, tokens sampled and not trained on,
            names of the sources of reward.
        tokens: of all completions.
        greedy: of the greedy completions that an estimator needs.
        completions: for completions.jsonl, without the step; none where they are not due.
        shown: which of them the console shows.
    """

    trace: Mapping[str, Any]
    tokens: StepTokens | None = None
    greedy: StepTokens | None = None
    completions: Sequence[Mapping[str, Any]] = ()
    shown: Sequence[int] = ()


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
    def _trace(self) -> list[dict[str, Any]]:
        return whole_lines(self.directory / TRACE)

    @property
    def starts(self) -> list[Start]:
        """The beginnings of the run: one, and another each time it was resumed."""
        return [Start(**line) for line in self._trace if "versions" in line]

    @cached_property
    def traces(self) -> dict[int, dict[str, Any]]:
        """The line of each step in trace.jsonl."""
        return {line["step"]: line for line in self._trace if "sources" in line}

    @cached_property
    def weights(self) -> dict[int, dict[str, str]]:
        """Fingerprints of the trained tensors, by the steps of checkpoints."""
        lines = (line for line in self._trace if "versions" not in line)
        return {line["step"]: line["weights"] for line in lines if "weights" in line}

    def tokens(self, step: int, greedy: bool = False) -> StepTokens | None:
        """Return the record of a step's completions; None if it cannot be read."""
        try:
            return StepTokens.load(tokens_file(self.directory, step, greedy))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None


def tokens_file(directory: Path, step: int, greedy: bool = False) -> Path:
    """Return the place of the record of a step's completions."""
    return directory / TOKENS / f"{'greedy-' * greedy}step-{step:08d}.safetensors"


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects with a step in a file, without a line that is not whole."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def version(package: str) -> str:
    """Return the version of a package, or "unknown"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, by name."""
    found = {name: version(name) for name in ("rlhf-pg", *PACKAGES, *ALSO)}
    there = {name: number for name, number in found.items() if number != "unknown"}
    return {"python": platform.python_version(), **there}
