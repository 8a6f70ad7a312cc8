"""The model card in final/, and the upload to the Hub."""

import logging
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import yaml

from rlhf_pg import PPOTrainer
from rlhf_pg.checkpoint.atomic import find_damage
from rlhf_pg.report.model_card import model_card
from rlhf_pg.tasks import arithmetic

NASTY = "a|b](javascript:x)<script>alert(1)</script>\n# `head`\x1b[31m"


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_final_has_card_with_method_data_curve_and_versions(make, tmp_path, capsys):
    held_out = arithmetic().eval_dataset.select(range(4))
    trainer = make(PPOTrainer, eval_dataset=held_out, eval_steps=2, use_peft=True)
    trainer.train()
    final = tmp_path / "run" / "final"
    card = (final / "README.md").read_text()
    assert find_damage(final) is None
    header = header_of(card)
    assert header["library_name"] == "peft"  # final/ has an adapter
    assert "ppo" in header["tags"]
    assert "base_model" not in header  # a directory of this machine
    assert "arXiv:1707.06347" in card
    assert trainer.fingerprints["train_dataset"] in card
    assert [line.split(" | ")[0] for line in card.splitlines() if line.startswith("| ")] == [
        *("| step", "| ---", "| 1", "| 2", "| 3")
    ]
    assert "num_generations: 4" in card
    assert "transformers 5" in card
    assert str(tmp_path) not in card
    assert "step 2  held out: reward " in capsys.readouterr().out


def test_card_escapes_what_comes_from_outside(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = {
        "algorithm": "GRPO",
        "model_name_or_path": NASTY,
        "dataset_name": [NASTY],
        "reward_funcs": [NASTY],
        "system_prompt": f"```\n</code>\n{NASTY}",
    }
    card = model_card(config, None, run)
    assert "No step was taken." in card
    outside = card.split("````yaml")[0]
    assert "<script>" not in outside
    assert r"a\|b\]\(javascript:x\)&lt;script&gt;" in outside
    assert "\x1b" not in card
    assert "\n# `head`" not in outside
    assert "base_model" not in header_of(card)
    inside = card.split("````yaml\n")[1].split("\n````")[0]
    assert yaml.safe_load(inside)["system_prompt"].startswith("```")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("README.md", "---\nbase_model: [me/base, me/other]\n---\n# `x: [`"),
        ("adapter_config.json", '{"base_model_name_or_path": "me/base"}'),
        ("config.json", '{"_name_or_path": "me/base"}'),
        ("../config.yaml", "model_name_or_path: me/base"),
    ],
)
def test_card_names_the_base_model_of_a_path(tmp_path, file, text):
    final = tmp_path / "final"
    final.mkdir()
    (final / file).write_text(text)
    config = {"algorithm": "GRPO", "model_name_or_path": str(final)}
    assert header_of(model_card(config, None, tmp_path))["base_model"] == "me/base"


@pytest.fixture
def hub(monkeypatch):
    """The client of the Hub, which notes what files are there when a directory is handed to it."""
    client = create_autospec(huggingface_hub.HfApi, instance=True, endpoint="https://hub")
    client.create_repo.return_value.repo_id = "me/run"
    client.there = []
    client.upload_folder.side_effect = lambda folder_path, **_: client.there.extend(
        path.name for path in folder_path.iterdir()
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: client)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_of_the_environment")
    return client


def test_final_is_uploaded_whole(make, tmp_path, hub):
    keys = {"push_to_hub": True, "hub_model_id": "me/run", "hub_private_repo": True}
    trainer = make(max_steps=1, **keys)
    trainer.train()
    hub.create_repo.assert_called_once_with("me/run", private=True, exist_ok=True)
    (upload,) = hub.upload_folder.call_args_list
    assert upload.kwargs["repo_id"] == "me/run"
    assert upload.kwargs["folder_path"] == tmp_path / "run" / "final"
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(hub.there)
    assert trainer.push_to_hub() == "https://hub/me/run"


def test_failed_card_and_upload_are_one_warning_each(make, tmp_path, hub, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("no card today")

    monkeypatch.setattr("rlhf_pg.report.model_card.model_card", fails)
    hub.create_repo.side_effect = OSError("the Hub is closed")
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        make(max_steps=1, push_to_hub=True).train()
    assert caplog.text.count("no card today") == 1
    assert caplog.text.count("the Hub is closed") == 1
    assert find_damage(tmp_path / "run" / "final") is None


def test_upload_without_token_is_refused_before_training(make, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    trainer = make(push_to_hub=True)
    with pytest.raises(ValueError, match="push_to_hub needs a Hub token: set HF_TOKEN"):
        trainer.train()
    assert trainer.state.step == 0


def test_card_names_no_server_no_directory_and_only_the_beginning_of_a_rubric(tmp_path) -> None:
    rubric = "Is it kind?\n" + "Would a reader of a newspaper be pleased by it? " * 9
    config = {
        "algorithm": "GRPO",
        "task": "openenv:http://10.0.0.5:7000",
        "reward_funcs": [
            *("http://10.0.0.5:9000/score", "judge:kind", "math"),
            *("model:/home/me/judge", "/home/me/r.py:acc", "model:org/judge"),
        ],
        "reward_options": {
            "http://10.0.0.5:9000/score": {"batch_size": 2},
            "kind": {"rubric": rubric, "model": "m", "base_url": "http://10.0.0.6:8000/v1"},
            "/home/me/r.py:acc": {"file": "/home/me/x"},
        },
        "system_prompt": "Answer as on https://example.org.",
    }
    card = model_card(config, None, tmp_path)
    assert "10.0.0" not in card
    assert "/home" not in card
    assert "Data: openenv:a server" in card
    assert "Rewards: a server, judge:kind, math, model:judge, r.py:acc, model:org/judge" in card
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("\n```")[0])
    assert settings["system_prompt"] == config["system_prompt"]
    options = settings["reward_options"]
    assert options["a server"] == {"batch_size": 2}
    assert options["r.py:acc"] == {"file": "x"}
    assert options["kind"].keys() == {"rubric", "model"}
    assert options["kind"]["rubric"].startswith("Is it kind? Would")
    assert len(options["kind"]["rubric"]) <= 80
