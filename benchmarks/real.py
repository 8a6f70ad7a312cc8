"""Train SmolLM2-135M-Instruct on tasks that a person can see, with every algorithm and with TRL.

    rlhf-pg fetch smollm2 && pip install vaderSentiment trl
    python -m benchmarks.real run happy grpo --seed 1       # docs/results/happy-grpo-1.json
    python -m benchmarks.real run happy grpo --seed 1 --full
    python -m benchmarks.real run happy grpo --seed 1 --trl
    python -m benchmarks.real all --jobs 12                 # what docs/results-tables.md shows

Both sides are scored by the same code: the completions of each held-out prompt that our trainer
samples, `num_generations_eval` of them. The seconds are those of training alone. On a CPU they are
of all its threads, and with OMP_NUM_THREADS=1 they do not depend on what else a machine does; on a
GPU they do.
"""

import argparse
import copy
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import TrainerCallback

from rlhf_pg import Callback
from rlhf_pg.config.parse import load
from rlhf_pg.trainers import TRAINERS

ROOT = Path(__file__).parents[1]
GPU = torch.cuda.is_available()
RESULTS = ROOT / "docs" / "results"
KEPT = (
    *("reward", "rewards/happiness/mean", "entropy", "kl", "explained_variance"),
    "completions/mean_length",
)
# Beyond the recipe of the task, which is GRPO's without a KL: what an algorithm needs.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"beta": 0.0},
    "reinforce_pp": {
        "algorithm": "reinforce",
        "beta": 0.0,
        "advantage_estimator": "returns",
        "normalize_advantages": True,
        "policy_loss": "clipped_surrogate",
        "aggregation": "token_mean",
    },
    "ppo": {"beta": 0.0, "num_iterations": 1, "value_learning_rate": 1e-3},
}
FULL = {"use_peft": False, "learning_rate": 2e-5}
SEEDS = {"yes_no": 3, "letters": 3, "problems": 3, "arithmetic": 5, "happy": 5}
# Students of the first run's model on the embedded task: by rewards too, and by it alone.
STUDENT = (
    "--set teacher_model_name_or_path=runs/arithmetic-grpo-1/final num_mini_batches=8 "
    "num_iterations=8 learning_rate=2e-4 max_steps=40"
)
STUDENTS = (f"grpo --name rewarded {STUDENT}", f"grpo --name taught {STUDENT} policy_loss=none")
# What docs/results-tables.md shows: task, how, and seeds from 1 to the number.
MATRIX = [(task, algorithm, n) for task, n in SEEDS.items() for algorithm in ALGORITHMS]
MATRIX += [("arithmetic", how, 5) for how in STUDENTS]  # after arithmetic grpo
MATRIX += [("shown", "grpo", 5)]
MATRIX += [("relay", how, 5) for how in ("grpo", "ppo")]  # after python examples/agents/relay.py
MATRIX += [("learned", "ppo", 1)]  # after two recipes: see recipes/smollm2_sft.yaml
MATRIX += [("letters", f"{algorithm} --full", 3) for algorithm in ("grpo", "ppo")]
MATRIX += [
    (task, f"{algorithm} --trl --batch 16", 3)  # faster than 64 at a time
    for task in ("happy", "letters")
    for algorithm in ("grpo", "rloo")
]
MATRIX += [("problems", "grpo --trl --batch 16", 3)]  # see recipes/smollm2_equations.yaml
# The learning rates, with a KL that is measured and hardly paid: ranks 1 and 16, and all weights.
LATER: list[tuple[str, str, int]] = []
RATES = {
    "rank-1": (1e-4, 5e-4, 2e-3, 1e-2),
    "rank-16": (5e-5, 2e-4, 1e-3, 5e-3),
    "full": (1e-6, 5e-6, 2e-5, 1e-4, 1e-3),
}
for kind, rates in RATES.items():
    how = "--full --set" if kind == "full" else f"--set lora_r={kind.removeprefix('rank-')}"
    for rate in rates:
        settings = f"{how} beta=0.000001 learning_rate={rate:f}"
        LATER.append(("letters", f"grpo --name {kind}-rate-{rate:g} {settings}", 1))


def clock() -> float:
    """Seconds: of all threads on a CPU, or of the work that a GPU has done."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class HeldOut:
    """The mean reward of held-out prompts over the course of a training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rows = trainer.args.prompts_per_step * trainer.args.num_generations
        self.curve: list[dict[str, float]] = []
        self.steps: list[dict[str, float]] = []
        self.seconds, self.start = 0.0, 0.0

    def score(self) -> None:
        """Add a point to the curve: samples and seconds of training so far, score, its error."""
        metrics = self.trainer.evaluate(temperature=self.trainer.args.temperature)
        point = {"samples": self.rows * len(self.steps), "seconds": round(self.seconds, 2)}
        score = {"score": metrics["eval_reward"], "stderr": metrics["eval_reward_stderr"]}
        self.curve.append(point | score)
        print(self.curve[-1], flush=True)

    def greedy(self) -> float:
        """The score of the likeliest completions."""
        return float(self.trainer.evaluate(temperature=0.0)["eval_reward"])

    def begin(self) -> None:
        self.start = clock()

    def end(self, metrics: dict[str, Any]) -> None:
        self.seconds += clock() - self.start
        self.steps.append({key: metrics[key] for key in KEPT if key in metrics})
        whole = self.trainer.args.max_steps
        if len(self.steps) % max(5 if whole >= 10 else 1, whole // 10) == 0:
            self.score()


class Ours(Callback):
    def on_step_begin(self, trainer: Any) -> None:
        trainer.held_out.begin()

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        trainer.held_out.end(metrics)


class Theirs(TrainerCallback):
    """TRL trains a copy, since it changes the forward of a model that it is given."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out, self.means = held_out, list[float]()
        self.model = copy.deepcopy(held_out.trainer.model)

    def on_step_begin(self, *_: Any, **options: Any) -> None:
        self.held_out.begin()

    def on_step_end(self, *_: Any, **options: Any) -> None:
        own = dict(self.held_out.trainer.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    own[name].copy_(parameter)
        self.held_out.end({"reward": self.means[-1]})


def of_trl(algorithm: str, trainer: Any, batch: int, callback: Theirs) -> Any:
    """Make TRL's trainer of the same run as one of ours, which is not trained."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    kind, config = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[algorithm]
    args, reward = trainer.args, trainer.rewards.sources[0].function
    rows = callback.held_out.rows

    def counted(completions: Any, **columns: Any) -> list[float]:
        scores = list(map(float, reward(completions=completions, **columns)))
        callback.means.append(sum(scores) / len(scores))
        return scores

    return kind(
        model=callback.model,
        reward_funcs=counted,
        processing_class=trainer.processing_class,
        train_dataset=trainer.train_prompts.rows,
        callbacks=[callback],
        args=config(
            output_dir=f"{args.output_dir}/trl",
            use_cpu=not GPU,
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


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the result."""
    algorithm, own = flags.algorithm, FULL if flags.full else {}
    if flags.task == "arithmetic":  # embedded, from weights without any training
        own = ALGORITHMS["reinforce_pp"] | {"beta": 0.01, "num_mini_batches": 2}
        own = own if algorithm == "reinforce_pp" else {"algorithm": algorithm}
        recipe = ROOT / "recipes" / f"{own['algorithm']}_arithmetic.yaml"
        own |= {"eval_steps": 0, "max_steps": 200}
    elif flags.task == "relay":  # embedded too
        recipe = ROOT / "examples" / "agents" / "relay.yaml"
        own = {"num_iterations": 1, "value_learning_rate": 2e-3} if algorithm == "ppo" else {}
        own |= {"num_generations_eval": 2}
    else:
        recipe = ROOT / "recipes" / f"smollm2_{flags.task}.yaml"
        own = {} if flags.task in ("learned", "shown") else ALGORITHMS[algorithm] | own
    pairs = (pair.split("=", 1) for pair in flags.set)
    settings = {key: yaml.safe_load(value) for key, value in pairs}
    own |= settings
    name = name_of(flags)
    algorithm = own.get("algorithm", flags.algorithm)
    kind = TRAINERS[algorithm]
    own |= {"algorithm": algorithm, "seed": flags.seed, "output_dir": f"runs/{name}"}
    args = kind.config_type(**load(recipe) | own).locate(recipe.parent)
    trainer: Any = kind(args=args, callbacks=[Ours()])
    trainer.held_out = held_out = HeldOut(trainer)
    held_out.score()
    greedy = [held_out.greedy()]
    teacher = teacher_score(trainer) if trainer.privileged_prompt else None
    if flags.trl:
        batch = flags.batch or held_out.rows
        of_trl(algorithm, trainer, batch, Theirs(held_out)).train()
    else:
        trainer.train()
    greedy.append(held_out.greedy())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    packages = ("rlhf-pg", "torch", "transformers", "peft", "trl")
    return {
        "task": flags.task,
        "algorithm": ("TRL " if flags.trl else "") + flags.algorithm,
        "weights": "full" if flags.full or flags.task in ("arithmetic", "relay") else "LoRA",
        "seed": flags.seed,
        "name": flags.name,
        "settings": settings,
        "command": " ".join(["python -m benchmarks.real", *sys.argv[1:]]),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)[:-1],
        "date": str(datetime.date.today()),
        "machine": torch.cuda.get_device_name() if GPU else machine,
        "versions": {name: version(name) for name in packages},
        "recipe": load(recipe) | own,
        "peak_bytes": torch.cuda.max_memory_allocated() if GPU else peak,
        "steps": held_out.steps,
        "held_out": held_out.curve,
        "greedy": greedy,
    } | ({} if teacher is None else {"teacher": teacher})


def teacher_score(trainer: Any) -> dict[str, float]:
    """Score what the untrained policy says to the teacher's prompts of the held-out rows."""
    [rows] = [one.rows for one in trainer.eval_sets.values()]
    told = Dataset.from_dict({"prompt": trainer.privileged_prompt(prompts=list(rows["prompt"]))})
    metrics = trainer.evaluate(told, temperature=trainer.args.temperature)
    return {"score": metrics["eval_reward"], "stderr": metrics["eval_reward_stderr"]}


def name_of(flags: argparse.Namespace) -> str:
    """Return the name of the file of results."""
    words = [flags.task, *(["trl"] * flags.trl), flags.algorithm, *(["full"] * flags.full)]
    return "-".join([*words, *([flags.name] * bool(flags.name)), str(flags.seed)])


def run_all(parser: argparse.ArgumentParser, jobs: int) -> None:
    """Make what docs/results-tables.md shows and is not there yet, some runs at a time."""
    commands = []
    rows = [(n, row) for n in range(1, max(SEEDS.values()) + 1) for row in MATRIX if n <= row[2]]
    three = [row for row in rows if row[0] <= 3]
    for seed, (task, options, _) in [*three, *((1, row) for row in LATER), *rows[len(three) :]]:
        words = f"run {task} {options} --seed {seed}".split()
        if not (RESULTS / f"{name_of(parser.parse_args(words))}.json").exists():
            commands.append([sys.executable, "-m", "benchmarks.real", *words])
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(subprocess.run, commands))


def check(parser: argparse.ArgumentParser) -> None:
    """Train the shortest task with two seeds; fail where a score leaves the band of the results."""
    known = [
        json.loads(path.read_text())["held_out"] for path in RESULTS.glob("yes_no-grpo-?.json")
    ]
    for seed in (1, 2):
        curve = run(parser.parse_args(f"run yes_no grpo --seed {seed}".split()))["held_out"]
        for point, *others in zip(curve, *known, strict=True):
            scores, room = [other["score"] for other in others], 2 * point["stderr"] + 0.05
            if not min(scores) - room <= point["score"] <= max(scores) + room:
                raise SystemExit(f"seed {seed}, {point}: the results have {scores} there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("task", choices=[*SEEDS, "learned", "relay", "shown"])
    one.add_argument("algorithm", choices=ALGORITHMS)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--full", action="store_true", help="all weights, no adapter")
    one.add_argument("--trl", action="store_true")
    one.add_argument("--batch", type=int, help="completions that TRL computes at a time")
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    one.add_argument("--name", default="", help="of other settings, in the name of the file")
    whole = commands.add_parser("all")
    whole.add_argument("--jobs", type=int, default=1, help="runs at a time")
    commands.add_parser("check")
    flags = parser.parse_args()
    if flags.command == "run":
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name_of(flags)}.json").write_text(json.dumps(run(flags), indent=1) + "\n")
    elif flags.command == "all":
        run_all(parser, flags.jobs)
    else:
        check(parser)


if __name__ == "__main__":
    main()
