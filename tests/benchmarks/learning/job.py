"""One run, in a process of its own."""

import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.benchmarks.learning.subject import SUBJECTS, Subject, held_out_score, load
from tests.benchmarks.learning.watch import Watch

WARMUP = 5  # steps


@dataclass(frozen=True, kw_only=True)
class Job:
    """One method of one side on one task, with one seed.

    Attributes:
        model: path of the weights to start from.
        samples: the budget.
        every: steps from one evaluation to the next; 0 evaluates nothing.
        temperature: of the evaluations.
        batch: completions per forward pass of TRL.
        options: more keys of this library's config.
    """

    task: str
    method: str
    side: str
    seed: int
    model: str
    samples: int
    every: int
    temperature: float
    learning_rate: float
    batch: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.task]

    @property
    def steps(self) -> int:
        return self.samples // (self.subject.prompts * self.subject.n)

    @property
    def group(self) -> str:
        """The task, the method and the side; seeds tell runs of a group apart."""
        return f"{self.task.replace(':', '_')}-{self.method}-{self.side}"

    @property
    def name(self) -> str:
        return f"{self.group}-{self.seed}"


def lines(path: Path) -> list[dict[str, Any]]:
    """What a run has written: its settings, steps and evaluations."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def ensure(job: Job, directory: Path) -> Path:
    """The file of a run, which is made unless it is there.

    Raises:
        RuntimeError: the run failed, or the file is of a run with other settings.
    """
    path = directory / f"{job.name}.jsonl"
    wanted = dataclasses.asdict(job)
    if path.exists():
        if lines(path)[0] != wanted:
            raise RuntimeError(f"{path} is of other settings: remove it, or choose another --out")
        return path
    directory.mkdir(parents=True, exist_ok=True)
    growing = path.with_suffix(".unfinished")
    command = [sys.executable, "-m", "tests.benchmarks.learning.job", json.dumps(wanted)]
    done = subprocess.run([*command, str(growing)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job.name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    growing.replace(path)
    return path


def train(job: Job, model: PreTrainedModel, tokenizer: Any, watch: Watch, output_dir: str) -> None:
    """Train the model on the job's side."""
    side = {"ours": "ours", "trl": "theirs"}[job.side]  # only this side's library is imported
    module = importlib.import_module(f"tests.benchmarks.learning.{side}")
    module.train(job, model, tokenizer, watch, output_dir)


def _run(described: str, path: str) -> None:
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    job = Job(**json.loads(described))
    model, tokenizer = load(job.model)
    reward = job.subject.task.reward
    assert reward is not None
    score = partial(held_out_score, job.subject, model, tokenizer, job.temperature)
    with Path(path).open("w") as file, tempfile.TemporaryDirectory() as directory:
        print(described, file=file)
        train(job, model, tokenizer, Watch(reward, score, job.every, file), directory)


if __name__ == "__main__":
    _run(*sys.argv[1:])
