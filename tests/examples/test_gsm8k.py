"""GSM8K by PPO: answers are read as a person would, and the example runs from question to score."""

import json
import os
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_pg import PPOConfig
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder
from tests.examples import load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def gsm8k() -> ModuleType:
    return load("gsm8k")


# Text, what stands after "####", and what is given in whatever form.
ANSWERS = [
    ("9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18", "18"),
    ("#### 18.", "18", "18"),  # the full stop ends a sentence
    ("#### $1,234.50 in all", "1234.5", "1234.5"),
    ("#### -3", "-3", "-3"),
    ("#### 7\nno, wait: #### 8", "8", "8"),
    ("The answer is 18 dollars.", None, "18"),
    ("First 5, then 6, so \\boxed{11}.", None, "11"),
    ("#### eighteen, that is 18", None, "18"),
    ("eighteen", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("text", "marked", "last"), ANSWERS)
def test_answer_is_parsed(
    gsm8k: ModuleType, text: str, marked: str | None, last: str | None
) -> None:
    assert gsm8k.marked_answer(text) == (None if marked is None else Decimal(marked))
    assert gsm8k.last_answer(text) == (None if last is None else Decimal(last))


def test_right_answer_scores_one(gsm8k: ModuleType) -> None:
    texts = ["#### 18", "#### 18.0", "So 18.", "#### 81", "#### 181", "no idea"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    right = ["18"] * len(texts)
    assert gsm8k.after_marks(chats, answer=right, prompts=[]) == [1, 1, 0, 0, 0, 0]
    assert gsm8k.anywhere(chats, answer=right, prompts=[]) == [1, 1, 1, 0, 0, 0]


PROBLEMS = {
    "question": ["Ann has 3 eggs and buys 1,000 more. How many?", "What is 2+2?"],
    "answer": ["3+1000 = <<3+1000=1003>>1003\n#### 1,003", "#### 4"],
}


def test_problems_become_prompts(gsm8k: ModuleType) -> None:
    dataset = gsm8k.prepared(Dataset.from_dict(PROBLEMS))
    assert set(dataset.column_names) == {"prompt", "answer"}
    assert dataset["answer"][:] == ["1003", "4"]
    (turn,) = dataset["prompt"][1]
    assert turn["role"] == "user"
    asked = 'What is 2+2? Let\'s think step by step and output the final answer after "####".'
    assert turn["content"] == asked
    with pytest.raises(ValueError, match="no number after"):
        gsm8k.prepared(Dataset.from_dict({"question": ["?"], "answer": ["four"]}))


@pytest.fixture(scope="module")
def run(gsm8k: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example leaves behind, with its own config but for sizes, on a tiny model."""
    directory = tmp_path_factory.mktemp("gsm8k")
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    torch.manual_seed(0)
    for part in (tiny_decoder(tokenizer, max_positions=256), tokenizer):
        part.save_pretrained(directory / "model")
    flags = ["--config", str(EXAMPLES / "gsm8k.yaml"), "--output_dir", str(directory / "run")]
    flags += ["--model_name_or_path", str(directory / "model"), "--dtype", "float32"]
    small = {"prompts_per_step": 4, "max_completion_length": 8, "max_steps": 2, "eval_steps": 1}
    flags += [f"--{key}={value}" for key, value in small.items()]
    splits = {name: Dataset.from_dict(PROBLEMS) for name in ("train", "test")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gsm8k, "load_dataset", lambda name, subset: splits)
        gsm8k.main(flags)
    return directory / "run"


def test_example_runs(run: Path) -> None:
    lines = read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in lines)
    for name in ("rewards/after_marks/mean", "rewards/anywhere/mean"):
        for prefix in ("", "eval_", "eval_greedy_"):
            assert lines[-1][f"{prefix}{name}"] == 0
    assert (run / "final" / "critic").is_dir()


NOTEBOOK = json.loads((EXAMPLES / "first_gpu_hour.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def python_of(cell: dict[str, Any]) -> str:
    """A cell without the lines that are for the shell or for Jupyter."""
    lines = "".join(cell["source"]).replace("\\\n", " ").splitlines()
    return "\n".join("pass" if line.startswith(("!", "%")) else line for line in lines)


def commands() -> list[str]:
    """What the cells hand to the shell, each in one line."""
    text = "\n".join("".join(cell["source"]) for cell in CODE).replace("\\\n", " ")
    return [line.lstrip("!%") for line in text.splitlines() if line.startswith(("!", "%"))]


def test_notebook_commands_are_valid(gsm8k: ModuleType) -> None:
    said = commands()
    (train,) = (line for line in said if "examples/gsm8k.py" in line)
    flags = train.split("examples/gsm8k.py", 1)[1].replace("examples/", f"{EXAMPLES}/").split()
    args = gsm8k.parse(PPOConfig, flags)  # every key exists
    assert args.max_steps > 0
    assert args.max_steps % args.eval_steps == 0  # so that its end is compared, too
    assert args.save_steps > 0  # a machine that is taken away costs no more than these
    (check,) = (line for line in said if "tests/gpu/run.sh" in line)
    assert Path(EXAMPLES.parent, check.split()[0]).exists()


def test_notebook_cells_run_without_gpu(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """From the checkout, on what the checks and the example leave behind."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("examples", "tests", "pyproject.toml", "docs"):
        os.symlink(EXAMPLES.parent / name, root / name)
    (root / "runs").mkdir()
    os.symlink(run, root / "runs" / "gsm8k")
    row = {"group": "flex", "what": "heads", "figure": "1e-6", "value": 1e-6, "passed": True}
    rows = [{**row, "seconds": 2.0}, {**row, "passed": False, "seconds": 1.0}]
    report = {"device": "some GPU", "versions": {"torch": "2.13.0"}, "checks": rows}
    (root / "gpu_report.json").write_text(json.dumps(report))
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    space: dict[str, Any] = {}
    for cell in CODE:
        exec(compile(python_of(cell), "cell", "exec"), space)
    said = capsys.readouterr().out
    assert "some GPU" in said
    assert "FAILED" in said
    assert "56.7" in said
