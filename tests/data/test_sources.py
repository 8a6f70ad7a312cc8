"""Datasets by name: kinds of files, splits, shares, mixtures, columns, and prompts made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from rlhf_pg.config import GRPOConfig
from rlhf_pg.config.inputs import DataConfig
from rlhf_pg.data.sources import load_datasets, make_prompts, with_prompts

ROWS = [{"question": f"{i}+1=", "solution": str(i + 1)} for i in range(10)]


def written(path: Path) -> Path:
    """The rows in a file or directory of the kind that its name says."""
    data = Dataset.from_list(ROWS)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".csv":
            data.to_csv(path, index=False)
        case ".tsv":
            data.to_csv(path, index=False, sep="\t")
        case ".parquet":
            data.to_parquet(path)
        case ".saved":
            data.save_to_disk(path)
        case ".splits":
            DatasetDict(train=data.select(range(7)), test=data.select([7, 8, 9])).save_to_disk(path)
        case ".folder":
            path.mkdir()
            data.select(range(7)).to_json(path / "train.jsonl")
            data.select([7, 8, 9]).to_json(path / "test.jsonl")
    return path


def loaded(path: Path, **keys):
    return load_datasets(DataConfig(dataset_name=str(path), **keys), seed=0)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "saved"])
def test_file_is_loaded_with_its_columns_renamed(tmp_path, kind):
    path = written(tmp_path / f"data.{kind}")
    train, held_out = loaded(path, dataset_columns={"prompt": "question", "answer": "solution"})
    assert [str(answer) for answer in train["answer"]] == [row["solution"] for row in ROWS]
    assert train["prompt"] == [row["question"] for row in ROWS]
    assert held_out == {}


@pytest.mark.parametrize("kind", ["splits", "folder"])
def test_splits_of_a_directory_are_found(tmp_path, kind):
    train, held_out = loaded(written(tmp_path / f"data.{kind}"), dataset_test_split="test")
    assert train["question"] == [row["question"] for row in ROWS[:7]]
    assert held_out[""]["question"] == [row["question"] for row in ROWS[7:]]
    whole = loaded(tmp_path / f"data.{kind}", dataset_train_split="all").train
    assert len(whole) == len(ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "splits"])
def test_slice_of_a_split_is_taken(tmp_path, kind):
    path = written(tmp_path / f"data.{kind}")
    assert len(loaded(path, dataset_train_split="train[2:4]").train) == 2


def test_share_is_split_off_by_the_seed_and_parts_keep_their_order(tmp_path):
    path = written(tmp_path / "data.jsonl")
    args = DataConfig(dataset_name=str(path), dataset_test_split=0.3)
    parts = [load_datasets(args, seed) for seed in (0, 0, 1)]
    held_out = [part.eval[""]["question"] for part in parts]
    assert held_out[0] == held_out[1] != held_out[2]
    assert len(held_out[0]) == 3
    for part, own in zip(parts, held_out, strict=True):
        questions = [row["question"] for row in ROWS]
        assert sorted(own, key=questions.index) == own
        assert part.train["question"] == [q for q in questions if q not in own]


def test_split_that_a_file_lacks_is_a_share_held_out(tmp_path, caplog):
    train, held_out = loaded(written(tmp_path / "data.jsonl"), dataset_test_split="test")
    assert (len(train), len(held_out[""])) == (9, 1)
    assert "dataset_test_split" in caplog.text


def test_several_evaluation_sets_have_their_files_names(tmp_path):
    paths = [written(tmp_path / name) for name in ("train.jsonl", "easy.jsonl", "hard.csv")]
    evaluated = loaded(paths[0], eval_dataset_name=[str(path) for path in paths[1:]]).eval
    assert {name: len(data) for name, data in evaluated.items()} == {"easy": 10, "hard": 10}


def test_mixture_takes_every_row_once_or_goes_by_weights(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text('{"question": "x", "solution": "y"}\n')
    names = (str(written(tmp_path / "data.jsonl")), str(few))
    assert len(load_datasets(DataConfig(dataset_name=names), 0).train) == 11
    weighted = DataConfig(dataset_name=names, dataset_weights=(1, 3))
    mixed = load_datasets(weighted, 0).train
    share = mixed["question"].count("x") / len(mixed)
    assert set(mixed["question"]) == {"x", *(row["question"] for row in ROWS)}
    assert 0.6 < share < 0.9
    assert load_datasets(weighted, 0).train["question"] == mixed["question"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_columns": {"prompt": "q"}}, "no column 'q'; it has question, solution"),
        ({"dataset_columns": {"prompt": "question", "x": "question"}}, "two names to one column"),
        ({"dataset_test_split": "val"}, "has no split 'val', but train"),
        ({"dataset_test_split": 0.99}, "leaves none to train on"),
    ],
)
def test_wrong_key_raises(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        loaded(written(tmp_path / "data.jsonl"), **keys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.jsonl", None, "there is no file or folder"),
        ("data.xlsx", "x", "an unknown file type: use one of .jsonl"),
        ("empty.jsonl", "", "no rows"),
        ("broken.jsonl", '{"prompt": \n', "cannot be loaded"),
        ("a.tsv", 'a\tb\n1\t2\n"x y\t3\n4\t5\n', r"line 3: .* double the quotes"),
    ],
)
def test_unreadable_file_raises(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("a.jsonl", '{"a": "2024-01-05"}\n\n{"a": null}\n', ["2024-01-05", None]),
        ("a.csv", "a,b\n4,x\n,x\n", [4, None]),
        ("a.csv", "a,b\n007,x\nNone,x\n,x\n", ["007", "None", None]),
        ("a.tsv", "\ufeffa\tb\n0.5\tx\n0.25\tx\n", [0.5, 0.25]),
        ("a.csv", "a\n4\n4.5\n", ["4", "4.5"]),
        ("a.txt", "x\n\n y\n", ["x", " y"]),
    ],
)
@pytest.mark.parametrize("place", ["run[1]", "run*"])
def test_values_and_names_stay_as_written(tmp_path, name, text, values, place):
    for folder in ("run1", place):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text if folder == place else text[:3] + "z\n")
    column = "text" if name == "a.txt" else "a"
    assert loaded(tmp_path / place / name).train[column][:] == values
    assert loaded(tmp_path / place).train[column][:] == values


def test_half_a_surrogate_pair_is_named_by_its_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n{"a": "\\ud83d"}\n{"a": "y"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl: row 1 .*'a'"):
        loaded(tmp_path / "a.jsonl")


def test_mixture_of_different_types_raises(tmp_path):
    (tmp_path / "numbers.jsonl").write_text('{"question": 5, "solution": {"a": 1}}\n')
    names = (str(written(tmp_path / "data.jsonl")), str(tmp_path / "numbers.jsonl"))
    with pytest.raises(ValueError, match="dataset_name cannot be mixed"):
        load_datasets(DataConfig(dataset_name=names), 0)


def made(rows, **keys):
    return with_prompts(Dataset.from_list(rows), DataConfig(**keys))["prompt"]


def test_files_with_other_types_and_chats_are_mixed(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    others = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    parts = {
        "a.csv": "answer\n007\n",
        "b.csv": "answer\n8\n",
        "c.jsonl": json.dumps({"messages": turns, "answer": 1.5}),
        "d.jsonl": json.dumps({"conversations": others, "answer": None}),
    }
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    names = [str(tmp_path / name) for name in parts]
    mixed = load_datasets(DataConfig(dataset_name=names), 0).train
    assert mixed["answer"][:] == ["007", "8", "1.5", None]
    assert mixed["messages"][:] == [None, None, turns, None]
    assert mixed["conversations"][:] == [None, None, None, turns]
    weighted = DataConfig(dataset_name=names[1:], dataset_weights=[1, 1, 1])
    assert {*load_datasets(weighted, 0).train["answer"]} == {8.0, 1.5, None}


def test_template_system_prompt_and_chat_make_prompts():
    user = {"role": "user", "content": "Say 0+1="}
    system = {"role": "system", "content": "Be brief."}
    assert made(ROWS[:1], prompt_template="Say {question}") == ["Say 0+1="]
    chat = {"prompt_template": "Say {question}", "apply_chat_template": True}
    assert made(ROWS[:1], **chat) == [[user]]
    assert made(ROWS[:1], **chat, system_prompt="Be brief.") == [[system, user]]
    assert made([{"prompt": [user]}], system_prompt="Be brief.") == [[system, user]]
    assert made([{"prompt": [user]}]) == [[user]]


def test_lines_of_text_are_prompts(tmp_path):
    (tmp_path / "lines.txt").write_text("1+1=\n2+2=\n")
    data = loaded(tmp_path / "lines.txt").train
    assert with_prompts(data, DataConfig())["prompt"] == ["1+1=", "2+2="]
    for name in ("text", "prompt"):
        filled = with_prompts(data, DataConfig(prompt_template=f"Q: {{{name}}}"))
        assert filled["prompt"] == ["Q: 1+1=", "Q: 2+2="]


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (ROWS, {"prompt_template": "{q}"}, "names {q}, but the dataset has the columns question"),
        (ROWS, {"prompt_template": "{question.__class__}"}, "names {question.__class__}"),
        (ROWS, {"prompt_template": "{"}, "prompt_template cannot be read"),
        ([{"a": "x"}, {"a": None}], {"prompt_template": "{a}"}, "{a}, which row 1 lacks"),
        ([{"a": "x"}], {"prompt_template": "{a:d}"}, "cannot be filled with row 0: ValueError"),
        (
            [{"prompt": [{"role": "system", "content": "x"}]}],
            {"system_prompt": "y"},
            "row 0 has a system message already",
        ),
        ([{"prompt": " "}], {"apply_chat_template": True}, "the prompt in row 0 is empty"),
    ],
)
def test_prompt_that_cannot_be_made_raises(rows, keys, message):
    with pytest.raises(ValueError, match=message):
        made(rows, **keys)


def test_columns_of_chats_are_read_or_refused() -> None:
    user = [{"role": "user", "content": "a"}]
    schema = {"name": "f", "parameters": {}}
    data = make_prompts([{"prompt": user, "functions": [schema]}], GRPOConfig(), "train_dataset")
    assert data["tools"] == [json.dumps([schema])]
    speakers = [{"from": None, "value": None, **user[0]}, {"from": "gpt", "value": "b"}]
    [prompt] = make_prompts([{"prompt": speakers, "system": "s"}], GRPOConfig(), "x")["prompt"]
    assert [message["role"] for message in prompt] == ["system", "user", "assistant"]
    with pytest.raises(ValueError, match="row 0 is text, but its column system"):
        make_prompts([{"prompt": "a", "system": "s"}], GRPOConfig(), "train_dataset")
    for other in (["a", "b"], 3):  # for rewards
        data = make_prompts([{"prompt": user, "functions": other}], GRPOConfig(), "train_dataset")
        assert data["functions"] == [other]


def test_prompts_of_a_teacher_are_made_like_the_policys() -> None:
    """By a template that wins over a column, in a chat around its last message, or of a column."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}]
    keys: dict = {"teacher_model_name_or_path": "policy"}

    def made(row: dict, **more: Any) -> Any:
        args = GRPOConfig(**keys | more)
        return make_prompts([row], args, "train_dataset")["privileged_prompt"][0]

    told = made({"prompt": chat, "answer": 4}, privileged_prompt="{prompt} It is {answer}.")
    assert told == [chat[0], {"role": "user", "content": "2+2? It is 4."}]
    row = {"prompt": "2+2?", "privileged_prompt": "4!"}
    assert made(row) == "4!"
    assert made(row, privileged_prompt="{prompt}!") == "2+2?!"
    told = made(row, system_prompt="s")
    assert told == [chat[0], {"role": "user", "content": "4!"}]
