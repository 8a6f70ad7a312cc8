"""Models that begin without memory, and files that are written tensor by tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_pg.models.loading import load_model, load_policy
from rlhf_pg.models.policy import fingerprint
from rlhf_pg.models.streaming import empty_model, write
from tests.tiny import adapter, tiny_model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_empty_model_is_that_of_its_files(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    whole = load_model(str(tmp_path), torch.float32)
    made: Any = empty_model(AutoModelForCausalLM, str(tmp_path), torch.float32, False, None)
    assert all(p.is_meta for p in made.parameters())
    assert all(b.equal(c) for b, c in zip(made.buffers(), whole.buffers(), strict=True))
    for name, parameter in whole.named_parameters():
        place, _, leaf = name.rpartition(".")
        assert made.get_submodule(place).stored(leaf).equal(parameter)
    assert made.generation_config.temperature == 0.5
    ours, theirs = (x.config.to_dict() for x in (made, whole))
    assert ours == theirs
    for x in (made, whole):
        x.requires_grad_(False)
    assert fingerprint(made) == fingerprint(whole)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
def test_adapter_begins_like_one_on_whole_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    models: list[Any] = []
    for empty in (False, True):
        torch.manual_seed(3)
        here = torch.float32, torch.device("cpu"), adapter(**options)
        models.append(load_policy(str(tmp_path), *here, empty=empty))
    whole, made = models
    for (name, own), other in zip(made.named_parameters(), whole.parameters(), strict=True):
        assert own.requires_grad == other.requires_grad
        assert own.is_meta == ("lora_" not in name)
        place, _, leaf = name.rpartition(".")
        value = made.get_submodule(place).stored(leaf) if own.is_meta else own
        assert value.equal(other), name


def test_files_with_other_names_are_loaded_whole(tmp_path: Path) -> None:
    model = tiny_model("mixtral")  # an expert is a tensor of its own in its files
    model.save_pretrained(tmp_path)
    assert empty_model(AutoModelForCausalLM, str(tmp_path), torch.float32, False, None) is None


def test_file_written_tensor_by_tensor_is_read_by_others(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).double(), "b": torch.randn(7), "c": torch.ones(3).bool()}
    tensors |= {"d": torch.tensor(2.5).bfloat16(), "e": torch.zeros(0, 4)}
    write(tmp_path / "f", sorted(tensors.items(), key=lambda x: -x[1].itemsize), len(tensors))
    read = load_file(tmp_path / "f")
    assert read.keys() == tensors.keys()
    assert all(read[name].equal(x) and read[name].dtype == x.dtype for name, x in tensors.items())
    seen = []
    write(None, ((seen.append(n) or (n, x)) for n, x in tensors.items()), 5)
    assert seen == list(tensors)


@pytest.mark.parametrize("file", ["/dev/full", "/no/directory"])
def test_disk_that_takes_nothing_is_told_after_the_last_tensor(file: str) -> None:
    """Other processes send the rest."""
    seen = []
    tensors = ((seen.append(i) or str(i), torch.zeros(2**16)) for i in range(4))
    with pytest.raises(OSError, match="No s"):
        write(Path(file), tensors, 4)
    assert seen == [0, 1, 2, 3]
