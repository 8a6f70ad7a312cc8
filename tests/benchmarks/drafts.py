"""Tokens per second with drafts and without, step by step as GRPO learns a task, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.drafts [--steps 60] [--prompts 1 2 4 16]

The chain-of-thought task `counting` is trained as in `tests.benchmarks.learning`. After every step
its first prompts are sampled again, 8 completions each, by an engine without drafts and by one with
them, which take turns in being first. Both have the weights as they are, and the same tokens.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import transformers

from rlhf_pg import Callback, GRPOConfig, GRPOTrainer
from rlhf_pg.models.modes import evaluating
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.tasks.warm_start import ensure_model
from tests.benchmarks.learning.subject import SUBJECTS, load

SUBJECT = SUBJECTS["counting"]


class Timed(NamedTuple):
    """Rollouts for some prompts after a step."""

    prompts: int
    tokens: int
    plain: float  # seconds
    drafted: float


class Both(Callback):
    """Samples after every step with drafts and without, from engines of each number of prompts."""

    def __init__(self, prompts: list[int]) -> None:
        self.prompts = prompts
        self.engines: dict[int, tuple[NativeEngine, NativeEngine]] = {}
        self.last: list[str] = []  # prompts of the step
        self.timed: list[list[Timed]] = []

    def reward(self, prompts: list[str], **columns: Any) -> list[float]:
        """Score as the task does, and remember the prompts."""
        self.last = list(dict.fromkeys(prompts))
        assert SUBJECT.task.reward is not None
        scores: list[float] = SUBJECT.task.reward(prompts=prompts, **columns)
        return scores

    def on_start(self, trainer: Any) -> None:
        tokenizer = trainer.processing_class
        ends = tokenizer.eos_token_id, tokenizer.pad_token_id
        for count in self.prompts:
            self.engines[count] = (
                NativeEngine(trainer.model, *ends),
                NativeEngine(trainer.model, *ends, drafts=True),
            )

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in self.last]
        step = len(self.timed)
        with evaluating(trainer.model):
            self.timed.append([self._both(ids[:count], step) for count in self.prompts])
        speeds = " ".join(
            f"{8 * one.prompts} rows {one.tokens / one.plain:.0f} {one.tokens / one.drafted:.0f}"
            for one in self.timed[-1]
        )
        print(
            f"step {step + 1} entropy {metrics['entropy']:.4f} reward {metrics['reward']:.3f} "
            f"tokens/s without and with drafts: {speeds}",
            flush=True,
        )

    def _both(self, ids: list[list[int]], step: int) -> Timed:
        """Sample both ways, with the step for a seed."""
        params = SamplingParams(max_tokens=SUBJECT.new)
        seconds, said = [0.0, 0.0], [[], []]  # type: list[float], list[Any]
        for way in (0, 1) if step % 2 else (1, 0):
            engine = self.engines[len(ids)][way]
            start = time.perf_counter()
            said[way] = [c.tokens for c in engine.generate(ids, SUBJECT.n, params, seed=step)]
            seconds[way] = time.perf_counter() - start
        assert said[0] == said[1]
        return Timed(len(ids), sum(map(len, said[0])), *seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 2, 4, 16])
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, tokenizer = load(ensure_model("counting", None))
    both = Both(flags.prompts)
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=both.reward,
            args=GRPOConfig(
                output_dir=directory,
                prompts_per_step=SUBJECT.prompts,
                num_generations=SUBJECT.n,
                max_completion_length=SUBJECT.new,
                learning_rate=SUBJECT.learning_rate,
                max_steps=flags.steps,
                save_steps=0,
                log_completions_steps=0,
            ),
            train_dataset=SUBJECT.task.train_dataset,
            processing_class=tokenizer,
            callbacks=[both],
        )
        trainer.train()
    for name, part in (("first", both.timed[:10]), ("last", both.timed[-10:])):
        for one in zip(*part, strict=True):
            plain = statistics.median(timed.tokens / timed.plain for timed in one)
            drafted = statistics.median(timed.tokens / timed.drafted for timed in one)
            print(
                f"{name} 10 steps, {SUBJECT.n * one[0].prompts} completions: {plain:.0f} tokens/s "
                f"without drafts, {drafted:.0f} with: {drafted / plain:.2f}x"
            )


if __name__ == "__main__":
    main()
