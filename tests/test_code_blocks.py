"""The code of every page: Python is run, all else is read by what would run it.

Python runs in the order of the page, on a tiny model, with trainings cut to a step; recipes and
commands are parsed. `<!--gpu-->`, `<!--server-->` or `<!--package-->` before a block says what it
needs. The Bash script is run by tests/recipes/test_accelerate_configs.py.
"""

import dataclasses
import json
import os
import re
import shlex
import string
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_pg
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import CONFIGS, config_type_of, is_recipe, split_recipe
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.tasks import warm_start
from rlhf_pg.tasks.multi_turn import calculate
from rlhf_pg.tasks.tiny import tiny_decoder, tool_tokenizer
from rlhf_pg.trainers import PolicyGradientTrainer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The name of a file, what the block needs, its language, and the code.
BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?(?:^<!--(\w+)-->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCKS = {page: BLOCK.findall(page.read_text()) for page in PAGES}
MARKED = {"gpu": 4, "package": 2, "server": 1}

ROW = {"prompt": "1+2=", "question": "1+2", "answer": "3", "solution": "3"}
ROWS = [ROW | {"completion": "3", "chosen": "3", "rejected": "4", "start": n} for n in range(4)]
CHATS = [row | {"prompt": [{"role": "user", "content": "1+2="}]} for row in ROWS]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def search(query: str) -> str:
    """Search.

    Args:
        query: for what.
    """
    return query


# What pages name and do not define.
NAMES = {"search": search, "calculate": calculate, "settings": {}}
NAMES |= dict.fromkeys(("reward", "my_function", "short"), reward)
NAMES |= dict.fromkeys(("train", "held_out", "easy", "hard", "another_dataset"), ROWS)
NAMES |= dict.fromkeys(("pairs", "mine", "prompts"), ROWS)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a page be those of an empty directory, beside those of the repository."""
    monkeypatch.chdir(tmp_path)
    for path in ROOT.iterdir():
        if path.name != "runs":
            Path(path.name).symlink_to(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = tool_tokenizer(string.printable, ())
    tokenizer.save_pretrained(path)
    tiny_decoder(tokenizer, 512).save_pretrained(path)
    return str(path)


def test_marks_and_languages_are_known() -> None:
    found = [block for blocks in BLOCKS.values() for block in blocks]
    assert Counter(block[1] for block in found if block[1]) == MARKED
    assert {block[2] for block in found} == {"", "json", "python", "text", "yaml"}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda page: page.stem
)
def test_python_runs(page: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, judge = PolicyGradientTrainer.__init__, "runs/judge/final"

    def short(self: Any, model=..., reward_funcs=(), args=..., train_dataset=..., *rest, **more):
        config = self.config_type() if args is ... else args
        sizes = {"max_steps": 1, "prompts_per_step": 2, "max_completion_length": 8}
        data = CHATS if train_dataset is ... else train_dataset
        if isinstance(held_out := more.get("eval_dataset"), Dataset):
            more["eval_dataset"] = held_out.select(range(4))
        inputs = (tiny if model is ... else model, reward if reward_funcs is ... else reward_funcs)
        made(self, *inputs, dataclasses.replace(config, **sizes), data, *rest, **more)

    monkeypatch.setattr(PolicyGradientTrainer, "__init__", short)
    monkeypatch.setattr(warm_start, "ensure_model", lambda *_: tiny)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(judge)
    names = {name: getattr(rlhf_pg, name) for name in rlhf_pg.__all__} | NAMES
    names |= {"path": tiny, "reward_model": judge}
    if page.name == "replay.md":
        rlhf_pg.GRPOTrainer(..., ...).train()
        names["trainer"] = rlhf_pg.GRPOTrainer(..., ...)
    for name, mark, language, code in BLOCKS[page]:
        if language == "python" and not mark:
            Path(name or "block.py").write_text(code)
            code = re.sub(r'"Qwen/[^"]+"', repr(tiny), code).replace("137", "1")
            exec(compile(code, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_and_commands_are_read(page: Path) -> None:
    for name, _, language, code in BLOCKS[page]:
        Path(name or f"block.{language}").write_text(code)
        if language == "yaml":
            kind = CONFIGS[yaml.safe_load(code).get("algorithm", "grpo")]
            parse(kind, ["--config", name or "block.yaml"])
        elif language == "json":
            json.loads(code)
        elif language == "":
            for own in {*re.findall(r"(?<![\w/])\w+\.yaml", code)} - {*os.listdir()}:  # a reader's
                Path(own).write_text("algorithm: grpo" if "rlhf-pg train" in code else "seed: 1")
            for line in re.split(r"\n|&&", code.replace("\\\n", " ")):
                words = shlex.split(line, comments=True)
                read(*[word for word in words if not re.match("[A-Z_]+=", word)])


def read(program: str = "cd", *words: str) -> None:
    """Read a command as it does itself; files that it names have to be there."""
    program = program.rpartition("bin/")[2]
    if program in ("accelerate", "torchrun"):
        start = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        assert all(Path(word).exists() for word in words[:start] if word.endswith(".yaml"))
        read("python", *words[start:])
    elif program == "python" and words[0] == "-m":
        at, _, name = words[1].rpartition(".")
        if words[1] == "rlhf_pg.cli":
            read("rlhf-pg", *words[2:])
        elif at == "rlhf_pg.recipes":
            parse(CONFIGS[name], words[2:])
        else:
            assert find_spec(words[1])
    elif program == "python" and words[0].startswith("recipes/"):
        parse(CONFIGS[Path(words[0]).stem], words[1:])
    elif program == "make":
        assert {*words} <= {*re.findall(r"^([\w-]+):", Path("Makefile").read_text(), re.M)}
    elif program == "rlhf-pg":
        command, *words = words
        files = []
        if command in ("train", "preview", "plan", "eval"):
            is_model = command == "eval" and not is_recipe(words[0])
            files, words = split_recipe(words[is_model:])
        _, keys = parser_of(command).parse_known_args(words)
        assert not keys or command in ("train", "preview", "plan", "eval", "replay")
        kind = config_type_of(files, keys, CONFIGS) if files else PolicyGradientConfig
        parse(kind, [*keys, *(["--config", *map(str, files)] if files else ())])
    elif program not in ("cd", "docker", "git", "pip", "uv", "vllm"):
        assert Path(words[0] if program == "python" else program).exists()
