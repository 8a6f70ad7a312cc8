"""A supervised step beside that of transformers' `Trainer`, by hand.

    OMP_NUM_THREADS=2 python -m benchmarks.sft [--vocabulary 32000] [--rounds 2]

The model of `benchmarks.peer` in float32, the same 320 rows of 16 to 256 tokens, and the same
batches of 32 rows. Each side has a process of its own, whose peak memory is printed beside the
median seconds of its steps after the first, and the loss of the first.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.peer.workload import save_model
from rlhf_pg.config import SFTConfig
from rlhf_pg.report.run_files import read
from rlhf_pg.runtime import Runtime
from rlhf_pg.supervised.sft import fit

BATCH = 32
STEPS = 8
RATE = 1e-4


def new_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t1"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2")


def new_rows(vocabulary: int) -> list[Any]:
    """Make rows of random tokens, of which the first quarter is a prompt."""
    chance = random.Random(0)
    rows = []
    for _ in range(10 * BATCH):
        length = int(min(256, 16 + chance.expovariate(1 / 60)))
        ids = [chance.randrange(3, vocabulary) for _ in range(length)]
        prompt = length // 4
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


class Clock(TrainerCallback):
    """Records the seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def theirs(model: PreTrainedModel, directory: str) -> tuple[list[float], float]:
    """Return the seconds of each step of `Trainer`, and the first loss."""
    clock = Clock()
    vocabulary = model.config.vocab_size
    trainer = Trainer(
        model,
        TrainingArguments(
            directory,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=new_rows(vocabulary),
        data_collator=DataCollatorForSeq2Seq(new_tokenizer(vocabulary), padding=True),
        callbacks=[clock],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return clock.seconds, losses[0]


def ours(model: PreTrainedModel, directory: str) -> tuple[list[float], float]:
    """Return the seconds of each step of `train_sft`, and the first loss."""
    args = SFTConfig(
        output_dir=directory,
        batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        save_steps=0,
    )
    vocabulary = model.config.vocab_size
    tokenizer = new_tokenizer(vocabulary)
    fit(args, model, tokenizer, new_rows(vocabulary), {}, Runtime(cpu=True))
    lines = read(Path(directory, "metrics.jsonl"))
    return [line["step_time"] for line in lines], lines[0]["loss"]


SIDES = {"Trainer": theirs, "train_sft": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side is None:
        for side in [*SIDES] * flags.rounds:
            command = [
                sys.executable,
                *("-m", "benchmarks.sft"),
                f"--side={side}",
                f"--vocabulary={flags.vocabulary}",
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)
        return
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        path = save_model(Path(directory, "model"), flags.vocabulary, 256, 6)
        model = AutoModelForCausalLM.from_pretrained(path)
        seconds, loss = SIDES[flags.side](model, f"{directory}/run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    median = statistics.median(seconds[1:])
    print(f"{flags.side:10} {median:6.2f} s/step  {peak:5.2f} GiB  first loss {loss:.4f}")


if __name__ == "__main__":
    main()
