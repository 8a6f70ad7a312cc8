"""Recipe files with a value, or a piece of YAML, that makes no sense."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlhf_pg.cli.train import TRAINERS, algorithm_of, make_trainer
from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig, parse
from rlhf_pg.tasks import arithmetic
from tests.fuzz.case import STEPS, Case

CONFIGS = {"grpo": GRPOConfig, "ppo": PPOConfig, "rloo": RLOOConfig, "reinforce": ReinforceConfig}
SIZES = {
    "task": "arithmetic",
    "max_steps": STEPS,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 4,
    "micro_batch_tokens": 128,
    "save_steps": 1,
}
# What takes long by design, if it is large; what leads elsewhere; and what a run has to have here.
LEFT_OUT = {*SIZES, "algorithm", "output_dir", "model_name_or_path", "reward_model_name_or_path"}
LEFT_OUT |= {"report_to", "resume_from_checkpoint", "num_generations_eval", "value_model"}
SCALARS = [
    "null",
    "~",
    "-1",
    "0",
    "-0.0",
    ".nan",
    "-.inf",
    "1e400",
    "1e-400",
    "0x10",
    "0o17",
    "1:30",
]
SCALARS += ["yes", "'yes'", "NO", "''", "' '", "[]", "{}", "[[]]", "[null]", "{a: b}", "2020-01-01"]
SCALARS += ["99999999999999999999", "0.1.2", "1_000", "'\\e[2J'", '"\\e[2J"', '"\\0"', "!!str 5"]
SCALARS += ["!!binary aGVsbG8=", "!!set {a}", "!!python/name:os.system ''", "!!float x", "*nobody"]
SCALARS += ["&a [*a]", "|", "> text", "'auto'", "'--help'", "'--seed'", "--", "$HOME", "%s", "日本"]
# Whole files, which have nothing to do with a value.
FILES: dict[str, Callable[[str], bytes]] = {
    "nothing": lambda text: b"",
    "a comment": lambda text: b"# only this\n",
    "a list": lambda text: b"- algorithm: grpo\n",
    "a number": lambda text: b"5\n",
    "two documents": lambda text: f"{text}---\n{text}".encode(),
    "a tab": lambda text: f"{text}\tseed: 1\n".encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "latin-1": lambda text: f"{text}run_name: 'Grüße'\n".encode("latin-1"),
    "NUL bytes": lambda text: text.encode() + b"\x00",
    "line ends of a Mac": lambda text: text.replace("\n", "\r").encode(),
    "keys that are numbers": lambda text: f"{text}5: 5\n".encode(),
    "keys that are nothing": lambda text: f"{text}null: 5\n".encode(),
    "keys that are true": lambda text: f"{text}on: 5\n".encode(),
    "keys that are lists": lambda text: f"{text}? [a]\n: 5\n".encode(),
    "a key of no letters": lambda text: f"{text}'': 5\n".encode(),
    "a key that is a flag": lambda text: f"{text}--seed: 5\n".encode(),
    "a merge of nothing": lambda text: f"{text}<<: 5\n".encode(),
    "a directive": lambda text: f"%YAML 9.9\n---\n{text}".encode(),
    "a cut-off string": lambda text: f'{text}run_name: "a\n'.encode(),
}


def draw(rng: random.Random, number: int) -> Case:
    """Every other one is a value by chance for a key by chance."""
    algorithm = rng.choice(sorted(CONFIGS))
    keys = [f.name for f in dataclasses.fields(CONFIGS[algorithm]) if f.name not in LEFT_OUT]
    base = yaml.safe_dump({"algorithm": algorithm, **SIZES})
    if number % 3 == 0:
        what = sorted(FILES)[number // 3 % len(FILES)]
        said, names = FILES[what](base), ("recipe.yaml",)
    else:
        changes = {key: rng.choice(SCALARS) for key in rng.sample(keys, rng.choice([1, 1, 2]))}
        what = ", ".join(f"{key}: {value}" for key, value in changes.items())
        said = (base + "".join(f"{k}: {v}\n" for k, v in changes.items())).encode()
        names = (*changes, "recipe.yaml")

    def run(output: Path) -> Any:
        recipe, model = output.with_name("recipe.yaml"), output.with_name("model")
        recipe.write_bytes(said)
        for part in arithmetic().new_model():
            part.save_pretrained(model)
        where = ["--output_dir", str(output), "--model_name_or_path", str(model)]
        named = algorithm_of(recipe, list(TRAINERS))
        flags = ["--config", str(recipe), *where]
        return make_trainer(named, parse(TRAINERS[named].config_type, flags))

    return Case(kind="config", what=f"{algorithm} with {what}", run=run, names=names)
