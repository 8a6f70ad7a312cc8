"""`rlhf-pg chat`: turns from lines, adapters, and nothing of a model's text that is obeyed."""

import importlib
import io
import shutil

import pytest
import torch
from peft import get_peft_model

from rlhf_pg.cli import main
from rlhf_pg.cli.chat import SafeStreamer
from rlhf_pg.models.loading import load_model, tokenizer_from_pretrained
from rlhf_pg.tasks import TASKS, arithmetic
from tests.cli.conftest import refused
from tests.tiny import adapter, stir

chat = importlib.import_module("rlhf_pg.cli.chat")
GREEDY = ["--max_completion_length", "6"]  # the default


def talked(monkeypatch, lines: str, *flags: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    main(["chat", *flags])


def greedy_of(path: str, prompt: str) -> str:
    model = load_model(path, torch.float32)
    tokenizer = tokenizer_from_pretrained(model.name_or_path, trust_remote_code=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    said = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(said, skip_special_tokens=True)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> str:
    """A model whose tokenizer has no chat template."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plain")
    model, tokenizer = arithmetic().new_model()
    tokenizer.chat_template = None
    for part in (stir(model), tokenizer):
        part.save_pretrained(path)
    return str(path)


def test_lines_without_template_are_continued(plain_model, monkeypatch, capsys) -> None:
    talked(monkeypatch, "1+2=\n\n3+4=\n", plain_model, *GREEDY)
    said = capsys.readouterr().out
    assert said == f"{greedy_of(plain_model, '1+2=')}\n{greedy_of(plain_model, '3+4=')}\n"


def test_adapter_is_loaded_on_its_base(plain_model, monkeypatch, capsys, tmp_path) -> None:
    model = stir(get_peft_model(load_model(plain_model, torch.float32), adapter()))
    model.save_pretrained(tmp_path)
    talked(monkeypatch, "1+2=\n", str(tmp_path), *GREEDY)
    said = capsys.readouterr().out.rstrip("\n")
    assert said == greedy_of(str(tmp_path), "1+2=") != greedy_of(plain_model, "1+2=")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """A model with a chat template, random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("chat")
    for part in TASKS["calculator"]().new_model():
        part.save_pretrained(path)
    return str(path)


def test_chat_remembers_turns_until_told(chat_model, monkeypatch, capsys) -> None:
    seen = []
    plain = tokenizer_from_pretrained(chat_model, trust_remote_code=False)
    kept = type(plain).apply_chat_template

    def watched(self, messages, **options):
        seen.append([message["role"] for message in messages])
        return kept(self, messages, **options)

    monkeypatch.setattr(type(plain), "apply_chat_template", watched)
    flags = ["--max_completion_length", "4"]
    talked(monkeypatch, "1+2=\n3+4=\n/new\n5=\n", chat_model, *flags)
    one = ["user"]
    assert seen[::2] == [one, ["user", "assistant", "user"], one]  # each is checked first


def test_chat_with_a_run_has_its_system_prompt(chat_model, monkeypatch, capsys, tmp_path) -> None:
    seen = []
    shutil.copytree(chat_model, tmp_path / "final")
    (tmp_path / "config.yaml").write_text("algorithm: grpo\nsystem_prompt: Be brief.\n")
    monkeypatch.setattr(chat, "encode", lambda chat, _: seen.append(chat[0]["content"]) or [5])
    for flags in ((), ("--system_prompt", "Be long.")):
        talked(monkeypatch, "1+2=\n", str(tmp_path), *GREEDY, *flags)
    assert seen == ["Be brief.", "Be long."]


def test_chat_beyond_the_context_says_so(chat_model, monkeypatch, capsys) -> None:
    talked(monkeypatch, f"{'1+2=' * 99}\n1+2=\n", chat_model, *GREEDY)
    out, error = capsys.readouterr()
    assert "beyond the model's context" in error
    assert out.count("\n") == 1  # the next line is answered


def test_control_characters_of_model_are_escaped(capsys) -> None:
    streamer = SafeStreamer(arithmetic().make_tokenizer())
    streamer.on_finalized_text("a\x1b[2Jb\tc\u202e\n", stream_end=False)
    streamer.on_finalized_text("d", stream_end=True)
    assert capsys.readouterr().out == "a\\x1b[2Jb  c\\u202e\nd\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "are required: MODEL"),
        (["{model}", "--system_prompt", "x"], "no chat template"),
        (["{model}", "--top_p", "0"], "--top_p"),
        (["runs/gpro"], "no model directory runs/gpro; a model of the Hub"),
    ],
)
def test_wrong_usage_is_one_message(
    flags, said, plain_model, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    flags = [flag.format(model=plain_model) for flag in flags]
    assert said in refused(capsys, "chat", *flags)
