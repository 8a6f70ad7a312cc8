"""The cells of the notebooks run in order, with fewer steps (`make notebooks`: all, in Jupyter)."""

import json
import re
from pathlib import Path

import pytest

from rlhf_pg.tasks import Task

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
SMOLLM2 = ROOT / "models" / "smollm2"


def run(name: str, **fewer: int) -> None:
    """Run the cells of a notebook, with other numbers for some keyword arguments."""
    names: dict[str, object] = {}
    for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            for key, value in fewer.items():
                code = re.sub(rf"\b{key}=\d+", f"{key}={value}", code)
            exec(compile(code, f"{name}: {cell['id']}", "exec"), names)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_first_run(tmp_path, monkeypatch, capsys) -> None:
    def untrained(task: Task) -> str:
        model, tokenizer = task.new_model()
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "start")
        return str(tmp_path / "start")

    monkeypatch.setattr(Task, "warm_started_model", untrained)
    run("first_run", max_steps=2, prompts_per_step=4)
    said = capsys.readouterr().out
    assert "right sums after:  0.00 sampled, 0.00 greedy" in said


def test_own_reward(capsys) -> None:
    run("own_reward", steps=6, max_completion_length=4)
    said = capsys.readouterr().out
    assert "nothing found" in said
    assert "Reward is always 0, from step 1" in said


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs rlhf-pg fetch smollm2")
def test_ppo_smollm2(tmp_path, capsys) -> None:
    (tmp_path / "models").symlink_to(SMOLLM2.parent)
    run("ppo_smollm2")
    (found,) = re.findall(r"reward ([\d.]+) before, ([\d.]+) after", capsys.readouterr().out)
    before, after = map(float, found)
    assert before < 0.2
    assert after > 0.8


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_saved_without_outputs_and_names_files_that_exist(path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for name in re.findall(r"`([\w/-]+\.(?:md|ipynb))`", text):
        assert (ROOT / name).exists() or (NOTEBOOKS / name).exists(), name
