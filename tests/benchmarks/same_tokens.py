"""Whether tokens are the same with drafts and without, over millions of them, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.same_tokens --tokens 1e7 [--model DIR TASK]...

Random models of nine families, and trained ones that are given with the embedded task they were
trained on, sample with each of the options: without drafts in one process; with as many drafts as
can be in one; and with them in two, which have half the prompts each. Every third rollout has the
seed of the first, so that its drafts are right to the end.
"""

import argparse
import hashlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlhf_pg.rollout import NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native.drafts import History
from rlhf_pg.rollout.native.pace import Pace
from rlhf_pg.tasks import load_task
from tests.tiny import tiny_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "mistral", "gpt2", "gpt_neox", "phi", "opt")
OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"temperature": 0.3}, {"temperature": 0.7}, {"temperature": 2.0}, {"temperature": 0}),
    *({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}),
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
SAMPLES = 8


class Eager(Pace):
    """Drafts always, whatever they cost, and the number of tokens that they gave."""

    kept = 0

    def begin(self) -> bool:
        return True

    def tries(self, rows: int) -> bool:
        return True

    def passed(self, rows: int, gained: int, drafts: bool, seconds: float) -> None:
        super().passed(rows, gained, drafts, seconds)
        self.kept += gained - rows


class Case(NamedTuple):
    """A model and how it is sampled, three times."""

    model: str  # a family, or a directory
    task: str | None
    options: dict[str, Any]
    seed: int

    def load(self) -> tuple[PreTrainedModel, list[list[int]], int, int]:
        """Return the model, prompts, EOS and the most tokens of a completion."""
        if self.task is None:
            model = tiny_model(self.model, seed=self.seed, vocab_size=300).eval()
            generator = torch.Generator().manual_seed(self.seed)
            widths = torch.randint(2, 16, (16,), generator=generator).tolist()
            prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in widths]
            return model, prompts, 2, 48
        model = AutoModelForCausalLM.from_pretrained(self.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        rows = load_task(self.task).train_dataset
        texts = [rows[(16 * self.seed + i) % len(rows)]["prompt"] for i in range(16)]
        prompts = [tokenizer(text).input_ids for text in texts]
        longest = model.config.max_position_embeddings - max(map(len, prompts))
        return model, prompts, tokenizer.eos_token_id, min(192, longest)


class Sampled(NamedTuple):
    """Completions by their prompt's number, and how many tokens came from drafts."""

    digests: dict[int, bytes]
    tokens: int
    drafted: int


def sampled(case: Case, drafts: bool, share: slice) -> Sampled:
    """Sample for a share of the prompts."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model, prompts, eos, longest = case.load()
    engine = NativeEngine(model, eos, 0)
    pace = Eager()
    if drafts:
        engine.history = History()
        engine.history.pace = pace
    params = SamplingParams(**{"max_tokens": longest} | case.options)
    digests: dict[int, bytes] = {}
    tokens = 0
    for number, seed in enumerate((0, 1, 0)):
        with engine.session(params, seed) as session:
            for i in range(len(prompts))[share]:
                session.add(
                    Request(tokens=prompts[i], prompt_index=i, samples=tuple(range(SAMPLES)))
                )
            while not session.idle:
                for finished in session.step():
                    ids = finished.completion.tokens
                    place = (number * len(prompts) + finished.request.prompt_index) * SAMPLES
                    digests[place + finished.sample] = hashlib.sha256(repr(ids).encode()).digest()
                    tokens += len(ids)
    return Sampled(digests, tokens, pace.kept)


def cases(models: list[tuple[str, str]]) -> Iterator[Case]:
    """Every model with every option, again and again with other prompts."""
    seed = 0
    while True:
        for options in OPTIONS:
            for directory, task in models:
                yield Case(directory, task, options, seed)
            yield Case(FAMILIES[seed % len(FAMILIES)], None, options, seed)
        seed += 1


def submitted(pool: Executor, case: Case) -> tuple[Case, list[Future[Sampled]]]:
    """Have a case sampled in all ways."""
    ways = [(False, slice(None)), (True, slice(None)), (True, slice(0, None, 2))]
    ways.append((True, slice(1, None, 2)))
    return case, [pool.submit(sampled, case, *way) for way in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=float, default=1e5, help="sampled without drafts")
    parser.add_argument("--model", nargs=2, action="append", default=[], metavar=("DIR", "TASK"))
    flags = parser.parse_args()
    tokens = drafted = completions = different = 0
    every = cases([(directory, task) for directory, task in flags.model])
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        waiting = [submitted(pool, next(every)) for _ in range(2)]
        while tokens < flags.tokens:
            case, futures = waiting.pop(0)
            waiting.append(submitted(pool, next(every)))
            plain, alone, *halves = (future.result() for future in futures)
            both = halves[0].digests | halves[1].digests
            wrong = sum(
                plain.digests[i] != found[i]
                for found in (alone.digests, both)
                for i in plain.digests
            )
            if wrong:
                print(f"{wrong} completions differ: {case}", flush=True)
            tokens += plain.tokens
            drafted += alone.drafted
            completions += len(plain.digests)
            different += wrong
        for _, futures in waiting:
            for future in futures:
                future.cancel()
    print(
        f"{tokens} tokens in {completions} completions, {drafted} of them from drafts "
        f"({drafted / tokens:.0%}): {different} differ with drafts, in one process or in two"
    )


if __name__ == "__main__":
    main()
