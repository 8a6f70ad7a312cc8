"""Train SmolLM2-135M-Instruct on tasks that a person can see, with every algorithm and with TRL.

    rlhf-pg fetch smollm2 && pip install vaderSentiment
    python -m tests.benchmarks.real run happy grpo --seed 1       # docs/results/happy-grpo-1.json
    python -m tests.benchmarks.real run happy grpo --seed 1 --weights full
    python -m tests.benchmarks.real run happy grpo --seed 1 --trl

Both sides are scored by the same code: two answers to each held-out prompt, sampled by our engine.
The seconds are those of training alone.
"""

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rlhf_pg import Callback
from rlhf_pg.cli.train import TRAINERS
from rlhf_pg.config.parse import load, parse
from rlhf_pg.rewards.named import named_rewards
from rlhf_pg.rollout import NativeEngine, SamplingParams

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
EVERY = 5  # steps between two scores
# Beyond the recipe: what an algorithm needs, and full weights.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"beta": 0.0},
    "reinforce": {"beta": 0.0},
    "ppo": {"beta": 0.0},
}
FULL = {"use_peft": False, "learning_rate": 2e-6}


class HeldOut:
    """The mean reward of held-out prompts, and the curve of a training."""

    def __init__(self, trainer: Any, reward: Any, temperature: float, length: int) -> None:
        self.prompts, self.reward = trainer.eval_sets[""], reward
        self.tokenizer = trainer.processing_class
        self.params = SamplingParams(max_tokens=length, temperature=temperature)
        self.curve: list[dict[str, float]] = []
        self.rewards: list[float] = []
        self.seconds, self.samples, self.start = 0.0, 0, 0.0

    def score(self, model: Any) -> None:
        """Add a point to the curve: samples and seconds of training so far, score, its error."""
        engine = NativeEngine(
            model, [self.tokenizer.eos_token_id], self.tokenizer.pad_token_id or 0
        )
        sampled = engine.generate(self.prompts.tokens, 2, self.params, seed=1)
        texts = [self.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in sampled]
        said = [[{"role": "assistant", "content": text}] for text in texts]
        rows = self.prompts.rows.to_dict()
        columns = {k: [x for x in v for _ in range(2)] for k, v in rows.items() if k != "prompt"}
        scores = torch.tensor(self.reward(completions=said, **columns)).view(-1, 2).mean(1)
        error = float(scores.std()) / len(scores) ** 0.5
        point = {"samples": self.samples, "seconds": round(self.seconds, 2)}
        self.curve.append(point | {"score": float(scores.mean()), "stderr": error})
        print(self.curve[-1], flush=True)

    def begin(self) -> None:
        self.start = time.perf_counter()

    def end(self, model: Any, step: int, rows: int, reward: float) -> None:
        self.seconds += time.perf_counter() - self.start
        self.samples += rows
        self.rewards.append(reward)
        if step % EVERY == 0:
            self.score(model)


class Ours(Callback):
    held_out: HeldOut

    def on_step_begin(self, trainer: Any) -> None:
        self.held_out.begin()

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        rows = trainer.args.prompts_per_step * trainer.args.num_generations
        self.held_out.end(trainer.model, trainer.state.step, rows, metrics["reward"])


class Theirs(TrainerCallback):
    held_out: HeldOut

    def __init__(self, rows: int) -> None:
        self.rows, self.means = rows, list[float]()

    def on_step_begin(self, *_: Any, **options: Any) -> None:
        self.held_out.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.held_out.end(model, state.global_step, self.rows, self.means[-1])


def of_trl(algorithm: str, trainer: Any, batch: int, callback: Theirs) -> Any:
    """Make TRL's trainer of the same run as one of ours, which is not trained."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    kind, config = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[algorithm]
    args, reward = trainer.args, callback.held_out.reward
    rows = args.prompts_per_step * args.num_generations

    def counted(completions: Any, **columns: Any) -> list[float]:
        scores = list(map(float, reward(completions=completions, **columns)))
        callback.means.append(sum(scores) / len(scores))
        return scores

    return kind(
        model=trainer.model,
        reward_funcs=counted,
        processing_class=trainer.processing_class,
        train_dataset=trainer.train_prompts.rows,
        callbacks=[callback],
        args=config(
            output_dir=f"{args.output_dir}/trl",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=rows // batch,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            temperature=args.temperature,
            beta=0.0,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=args.max_grad_norm,
            adam_beta2=args.adam_beta2,
            weight_decay=args.weight_decay,
            max_steps=args.max_steps,
            seed=args.seed,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )


def run(flags: argparse.Namespace) -> None:
    """Train once, and write the result."""
    recipe = ROOT / "recipes" / f"smollm2_{flags.task}.yaml"
    own = SETTINGS[flags.algorithm] | (FULL if flags.weights == "full" else {})
    own |= dict(pair.split("=", 1) for pair in flags.set)
    name = "-".join(
        [flags.task, *(["trl"] * flags.trl), flags.algorithm]
        + ["full"] * (flags.weights == "full")
        + [flags.name] * bool(flags.name)
        + [str(flags.seed)]
    )
    given = {"algorithm": flags.algorithm, "seed": flags.seed, "output_dir": f"runs/{name}", **own}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    kind = TRAINERS[flags.algorithm]
    args = parse(kind.config_type, ["--config", str(recipe), *words])
    ours = Ours()
    trainer = kind(args=args, callbacks=[ours])
    (reward,) = named_rewards(args.reward_funcs)
    held_out = HeldOut(trainer, reward, args.temperature, args.max_completion_length)
    rows = args.prompts_per_step * args.num_generations
    theirs = Theirs(rows)
    ours.held_out = theirs.held_out = held_out
    held_out.score(trainer.model)
    if flags.trl:
        of_trl(flags.algorithm, trainer, flags.batch or rows, theirs).train()
    else:
        trainer.train()
    packages = ("rlhf-pg", "torch", "transformers", "peft", "trl")
    result = {
        "task": flags.task,
        "algorithm": ("TRL " if flags.trl else "") + flags.algorithm,
        "weights": flags.weights,
        "seed": flags.seed,
        "command": " ".join(["python -m tests.benchmarks.real", *sys.argv[1:]]),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)[:-1],
        "date": str(datetime.date.today()),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in packages},
        "recipe": load(recipe) | own,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rewards": held_out.rewards,
        "held_out": held_out.curve,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    one = parser.add_subparsers(required=True).add_parser("run")
    one.add_argument("task", choices=["happy"])
    one.add_argument("algorithm", choices=SETTINGS)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--weights", choices=["lora", "full"], default="lora")
    one.add_argument("--trl", action="store_true")
    one.add_argument("--batch", type=int, help="completions that TRL computes at a time")
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    one.add_argument("--name", default="", help="of other settings, in the name of the file")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
