"""The model card in final/, and the upload to the Hub, against a stub of it on loopback."""

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from rlhf_pg import PPOTrainer
from rlhf_pg.checkpoint.atomic import find_damage
from rlhf_pg.report.model_card import _redact, model_card
from rlhf_pg.tasks import arithmetic

NASTY = "a|b](javascript:x)<script>alert(1)</script>\n# `head`\x1b[31m"


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_final_has_card_with_method_data_curve_and_versions(make, tmp_path):
    held_out = arithmetic().eval_dataset.select(range(4))
    trainer = make(PPOTrainer, eval_dataset=held_out, eval_steps=2, use_peft=True)
    trainer.train()
    final = tmp_path / "run" / "final"
    card = (final / "README.md").read_text()
    assert find_damage(final) is None
    header = header_of(card)
    assert header["library_name"] == "peft"
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


# --------------------------------------------------------------------------------------- the Hub


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload needs; every file goes into the commit itself."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        if self.server.status != 200:
            return self.answer({"error": "the Hub is closed"}, self.server.status)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.answer({"url": f"http://{self.headers['Host']}/me/run"})
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            plain = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return self.answer({"files": plain})
        if not self.path.endswith("/commit/main"):  # a check of the card's header
            return self.answer({"errors": [], "warnings": []})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.server.files[value["path"]] = base64.b64decode(value["content"])
        return self.answer(
            {"commitUrl": f"http://{self.headers['Host']}/me/run/commit/0", "commitOid": "0"}
        )

    def do_GET(self) -> None:
        self.answer({"id": "me/run", "sha": "0", "siblings": []})

    def answer(self, value, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.created, server.files, server.status = [], [], {}, 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    server.address = address
    yield server
    server.shutdown()
    server.server_close()


def test_final_is_uploaded_with_token_of_environment(make, tmp_path, hub, capsys):
    keys = {"push_to_hub": True, "hub_model_id": "me/run", "hub_private_repo": True}
    trainer = make(max_steps=1, **keys)
    trainer.train()
    final = tmp_path / "run" / "final"
    (created,) = hub.created
    assert (created["name"], created["visibility"]) == ("run", "private")
    here = {str(p.relative_to(final)): p.read_bytes() for p in final.rglob("*") if p.is_file()}
    assert hub.files == here
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= here.keys()
    assert {token for _, token in hub.asked} == {"Bearer hf_of_the_environment"}
    assert f"uploaded to {hub.address}/me/run" in capsys.readouterr().out
    assert "hf_of" not in (tmp_path / "run" / "config.yaml").read_text()
    assert trainer.push_to_hub() == f"{hub.address}/me/run"


def test_failed_card_and_upload_are_one_warning_each(make, tmp_path, hub, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no card today")

    monkeypatch.setattr("rlhf_pg.report.model_card.model_card", fails)
    hub.status = 403
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        make(max_steps=1, push_to_hub=True).train()
    (said,) = [m for m in caplog.messages if "model card" in m]
    assert "no card today" in said
    (said,) = [m for m in caplog.messages if m.startswith("push_to_hub")]
    assert "could not be uploaded" in said
    assert "hf upload run" in said
    assert find_damage(tmp_path / "run" / "final") is None


def test_upload_without_token_is_refused_before_training(make, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    trainer = make(push_to_hub=True)
    with pytest.raises(ValueError, match="push_to_hub needs a Hub token: set HF_TOKEN"):
        trainer.train()
    assert trainer.state.step == 0


def test_card_names_no_server_and_only_the_beginning_of_a_rubric(tmp_path) -> None:
    rubric = "Is it kind?\n" + "Would a reader of a newspaper be pleased by it? " * 9
    config = {
        "algorithm": "GRPO",
        "task": "openenv:http://10.0.0.5:7000",
        "reward_funcs": ["http://10.0.0.5:9000/score", "judge:kind", "math"],
        "reward_options": {
            "http://10.0.0.5:9000/score": {"batch_size": 2},
            "kind": {"rubric": rubric, "model": "m", "base_url": "http://10.0.0.6:8000/v1"},
        },
        "system_prompt": "Answer as on https://example.org.",
    }
    card = model_card(config, None, tmp_path)
    assert "10.0.0" not in card
    assert "Data: openenv:a server" in card
    assert "Rewards: a server, judge:kind, math" in card
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("\n```")[0])
    assert settings["system_prompt"] == config["system_prompt"]
    options = settings["reward_options"]
    assert options["a server"] == {"batch_size": 2}
    assert options["kind"].keys() == {"rubric", "model"}
    assert options["kind"]["rubric"].startswith("Is it kind? Would")
    assert len(options["kind"]["rubric"]) <= 80


def test_card_names_no_directory_of_this_machine() -> None:
    config = {
        "reward_funcs": ["model:/home/me/judge", "/home/me/r.py:acc", "model:org/judge", "math"],
        "reward_options": {"/home/me/r.py:acc": {"file": "/home/me/x"}},
    }
    assert _redact(config) == {
        "reward_funcs": ["model:judge", "r.py:acc", "model:org/judge", "math"],
        "reward_options": {"r.py:acc": {"file": "x"}},
    }
