"""`rlhf-pg preview`: rows as the model sees them, without its weights."""

import json

import pytest

from rlhf_pg.cli import main
from rlhf_pg.tasks import TASKS
from tests.cli.conftest import refused


@pytest.fixture
def model(tmp_path) -> str:
    """A directory with a tokenizer and a config, but no weights."""
    built, tokenizer = TASKS["calculator"]().new_model()
    tokenizer.save_pretrained(tmp_path / "model")
    built.config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def shown(capsys, *flags: str) -> str:
    main(["preview", *flags])
    return capsys.readouterr().out


def recipe(tmp_path, model: str, rows: list[dict], **keys: object) -> str:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "recipe.yaml"
    keys = {"model_name_or_path": model, "dataset_name": str(data), **keys}
    file.write_text(json.dumps(keys))
    return str(file)


def test_conversations_show_what_is_learnt(tmp_path, model, capsys) -> None:
    turns = [{"from": "human", "value": "1+2"}, {"from": "gpt", "value": "3"}]
    file = recipe(tmp_path, model, [{"id": "x", "conversations": turns}] * 4, algorithm="sft")
    out = shown(capsys, file, "--rows", "1", "--assistant_only_loss", "true")
    assert "<user>1+2<assistant>«3<eos>»" in out
    assert "ignored: unknown" in out
    assert "ends at <eos>" in out
    assert "4 rows" in out
    assert "only 1 are different" in out


def test_prompts_say_what_goes_to_the_rewards(tmp_path, model, capsys) -> None:
    rows = [{"question": f"{n}+1", "answer": str(n + 1), "source": "s"} for n in range(9)]
    keys = {"algorithm": "grpo", "prompt_template": "{question}=", "reward_funcs": "exact"}
    keys["max_completion_length"] = 8
    page = tmp_path / "page.html"
    out = shown(capsys, recipe(tmp_path, model, rows, **keys), "--out", str(page))
    assert "0+1=" in out
    assert "apply_chat_template" in out  # a warning
    uses = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") == 3}
    assert "the prompt" in uses["question"]
    assert "the rewards" in uses["answer"]
    assert "ignored" in uses["source"]
    assert "0+1=" in page.read_text()


def test_pairs_and_tasks_are_shown(tmp_path, model, capsys) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    out = shown(capsys, recipe(tmp_path, model, rows, algorithm="reward_model"))
    assert "1+1=2<eos>" in out
    assert "1+1=3<eos>" in out
    assert "<tools>calculate<user>" in shown(capsys, "grpo_calculator")
    assert "«0<eos>»" in shown(capsys, "sft_arithmetic")


def test_rows_are_held_to_the_positions_of_the_model(tmp_path, model, capsys) -> None:
    """As in training; an algorithm may be named before a recipe without one."""
    rows = [{"prompt": "1+1=", "completion": "2" * 3000}]
    file = recipe(tmp_path, model, rows)
    assert "grpo --config" in refused(capsys, "preview", file)
    assert "row 0 has 300" in refused(capsys, "preview", "sft", "--config", file)
    out = shown(capsys, "sft", "--config", file, "--long_examples", "truncate")
    assert "no end is learnt" not in out
    rows = [{"prompt": "1" * 3000}]
    args = ("grpo", "--config", recipe(tmp_path, model, rows, reward_funcs="length"))
    assert "max_position_embeddings" in refused(capsys, "preview", *args)


def test_faulty_row_is_an_error_as_in_a_run(tmp_path, model, capsys) -> None:
    file = recipe(tmp_path, model, [{"messages": [{"role": "user", "text": "1"}]}], algorithm="sft")
    assert "row 0: message 0 (user)" in refused(capsys, "preview", file)
