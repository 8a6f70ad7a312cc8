"""Tools and environments by the names of their functions, as a recipe has them."""

import json
from pathlib import Path

import pytest

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.cli.preview import of_prompts
from rlhf_pg.config.parse import parse
from rlhf_pg.episodes.factory import load_tools
from rlhf_pg.tasks import calculator, guess
from rlhf_pg.trainers.inputs import Inputs, resolve_inputs

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


def none(completions):
    return [0.0] * len(completions)


class Game:
    def reset(self, example):
        return example["prompt"]

    def step(self, completion):
        return "", float(len(completion)), True
'''


def recipe(directory: Path, text: str) -> GRPOConfig:
    """A config from a recipe beside the file of its tools, read from elsewhere."""
    (directory / "my_tools.py").write_text(TOOLS)
    (directory / "recipe.yaml").write_text(f"algorithm: grpo\n{text}")
    args = ["--config", str(directory / "recipe.yaml"), f"--output_dir={directory / 'run'}"]
    return parse(GRPOConfig, [*args, "--max_steps=1", "--max_completion_length=8"])


def test_tools_of_a_recipe_are_offered_and_found_again(tmp_path, capsys) -> None:
    args = recipe(tmp_path, "tools: [my_tools.py:multiply]\nmax_turns: 2\n")
    model, tokenizer = calculator().new_model()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=[{"prompt": [{"role": "user", "content": "2*3"}]}] * 4,
    )
    trainer.train()
    assert f"tools: runs {tmp_path / 'my_tools.py'}:multiply" in capsys.readouterr().out
    shown = trainer.processing_class.decode(trainer.train_prompts.tokens[0])
    assert "<tools>multiply" in shown
    again = parse(GRPOConfig, ["--config", str(tmp_path / "run" / "config.yaml")])
    assert load_tools(again)[0][0](2, 3) == 6
    with pytest.raises(ValueError, match="tools is given twice"):
        resolve_inputs(again, Inputs(tools=[len]), trains=True)


def test_environment_of_a_recipe_is_played(tmp_path) -> None:
    args = recipe(tmp_path, "environment_factory: my_tools.py:Game\n")
    model, tokenizer = guess().new_model()
    data = guess().train_dataset.select(range(4))
    GRPOTrainer(model=model, processing_class=tokenizer, args=args, train_dataset=data).train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert "rewards/environment/mean" in json.loads(lines[0])


def test_preview_shows_tools_of_recipe(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "2*3"}]}\n' * 2)
    text = "tools: [my_tools.py:multiply]\nmax_turns: 2\ndataset_name: rows.jsonl\n"
    args = recipe(tmp_path, text + "reward_funcs: [my_tools.py:none]\n")
    _, tokenizer = calculator().new_model()
    seen = of_prompts(args, None, tokenizer, None)
    assert "<tools>multiply" in tokenizer.decode(seen.rows[0].ids)
