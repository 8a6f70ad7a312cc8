"""Tokens per second with drafts and without, step by step as GRPO learns a task, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.drafts [--prompts 2] [--epochs 5]

The chain-of-thought task `counting` is trained with few prompts in a step and 8 completions of
each. After every step its prompts are sampled again, by an engine without drafts and by one with
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
    """The rollouts after a step."""

    tokens: int
    reward: float  # of the step
    entropy: float
    plain: float  # seconds
    drafted: float


class Both(Callback):
    """Samples the prompts of every step with drafts and without."""

    def __init__(self) -> None:
        self.last: list[str] = []  # prompts of the step
        self.timed: list[Timed] = []

    def reward(self, prompts: list[str], **columns: Any) -> list[float]:
        """Score as the task does, and remember the prompts."""
        self.last = list(dict.fromkeys(prompts))
        assert SUBJECT.task.reward is not None
        scores: list[float] = SUBJECT.task.reward(prompts=prompts, **columns)
        return scores

    def on_start(self, trainer: Any) -> None:
        tokenizer = trainer.processing_class
        ends = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.engines = [
            NativeEngine(trainer.model, *ends, drafts=drafts) for drafts in (False, True)
        ]

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in self.last]
        step, params = len(self.timed), SamplingParams(max_tokens=SUBJECT.new)
        seconds, said = [0.0, 0.0], [[], []]  # type: list[float], list[Any]
        with evaluating(trainer.model):
            for way in (0, 1) if step % 2 else (1, 0):
                start = time.perf_counter()
                done = self.engines[way].generate(ids, SUBJECT.n, params, seed=step)
                seconds[way] = time.perf_counter() - start
                said[way] = [completion.tokens for completion in done]
        assert said[0] == said[1]
        tokens = sum(map(len, said[0]))
        self.timed.append(Timed(tokens, metrics["reward"], metrics["entropy"], *seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--problems", type=int, default=64, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, tokenizer = load(ensure_model("counting", None))
    both, steps = Both(), flags.problems // flags.prompts
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=both.reward,
            args=GRPOConfig(
                output_dir=directory,
                prompts_per_step=flags.prompts,
                num_generations=SUBJECT.n,
                max_completion_length=SUBJECT.new,
                learning_rate=flags.learning_rate,
                max_steps=flags.epochs * steps,
                save_steps=0,
                log_completions_steps=0,
            ),
            train_dataset=SUBJECT.task.train_dataset.select(range(flags.problems)),
            processing_class=tokenizer,
            callbacks=[both],
        )
        trainer.train()
    print(f"{flags.prompts * SUBJECT.n} completions in a rollout, {steps} rollouts in an epoch")
    print("epoch  entropy  reward  tokens/s  with drafts")
    for epoch in range(flags.epochs):
        part = both.timed[epoch * steps :][:steps]
        entropy, reward = (statistics.mean(one[i] for one in part) for i in (2, 1))
        plain, drafted = (statistics.median(one.tokens / one[i] for one in part) for i in (3, 4))
        print(
            f"{epoch + 1:5}  {entropy:7.4f}  {reward:6.3f}  {plain:8.0f}  {drafted:11.0f}  "
            f"{drafted / plain:.2f}x"
        )


if __name__ == "__main__":
    main()
