"""A saved state is the whole state: what goes on from it goes on as if it had never stopped."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    get_scheduler,
)

from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.checkpointer import (
    Checkpointer,
    TrainState,
    optimizer_tensors,
    read_state,
)
from rlhf_pg.models.policy import Policy, Reference, fingerprint
from rlhf_pg.rng import rng_tensors
from rlhf_pg.runtime import FullWeights, Runtime
from tests.tiny import tiny_model

IDS = torch.tensor([[5, 9, 3, 31, 17, 8], [2, 2, 7, 30, 1, 4]])
RUNTIME = Runtime()


def make_tokenizer():
    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(40)}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<2>", pad_token="<0>")


def make_checkpointer(directory, seed=0, arch="gpt2", dtype=torch.float32, reference=None):
    model = tiny_model(arch, seed=seed, dtype=dtype)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters()), "weight_decay": 0.1}], lr=1e-2
    )
    parts = {"model": model} if reference is None else {"model": model, "reference": reference}
    return Checkpointer(
        directory=directory,
        parts={name: FullWeights(part, splits=False) for name, part in parts.items()},
        tokenizer=make_tokenizer(),
        backend=RUNTIME.prepare(model, optimizer),
        scheduler=get_scheduler("cosine", optimizer, 2, 10),
        state=TrainState(),
        config={"seed": 1, "max_steps": 10},
        fingerprints=lambda: (
            {
                name: fingerprint(parts[name]) if name in parts else None
                for name in ("model", "reference", "critic")
            }
            | {"tokenizer": "a", "train_dataset": "b"}
        ),
    )


def model_of(checkpointer):
    return checkpointer.parts["model"].module


def train(checkpointer, steps):
    """Steps that use every part of the state: weights, moments, schedule and random numbers."""
    for _ in range(steps):
        noise = torch.randn(IDS.shape).exp() * random.gauss(1, 0.1) * np.random.normal(1, 0.1)
        losses = model_of(checkpointer)(IDS).logits.logsumexp(-1) * noise
        losses.sum().backward()
        checkpointer.backend.step()
        checkpointer.scheduler.step()
        checkpointer.state.step += 1
        checkpointer.state.prompt_index += 16
        checkpointer.state.num_tokens += 300


def everything(checkpointer):
    """All that a step depends on, in a form that can be compared for equality."""
    names = {p: name for name, p in model_of(checkpointer).named_parameters()}
    tensors = {
        **model_of(checkpointer).state_dict(),
        **dict(optimizer_tensors(checkpointer.backend, names)),
        **rng_tensors(),
    }
    return {
        "state": vars(checkpointer.state).copy(),
        "scheduler": checkpointer.scheduler.state_dict(),
        "rates": [group["lr"] for group in checkpointer.backend.optimizer.param_groups],
        **{name: tensor.tolist() for name, tensor in tensors.items() if name != "python_gauss"},
    }


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("gpt2", torch.float64), ("qwen3", torch.float32), ("qwen3", torch.bfloat16)],
)
def test_resumed_training_is_bit_identical(tmp_path, arch, dtype):
    seed_everything(0)
    first = make_checkpointer(tmp_path, arch=arch, dtype=dtype)
    train(first, 3)
    path = first.save(RUNTIME)
    saved = everything(first)
    train(first, 3)
    expected = everything(first)

    seed_everything(99)
    second = make_checkpointer(tmp_path, seed=1, arch=arch, dtype=dtype)
    train(second, 1)  # moments, schedule and counters that are to be replaced
    second.restore(path, rank=0)
    assert everything(second) == saved
    assert second.state == TrainState(step=3, prompt_index=48, num_tokens=900)
    train(second, 3)
    assert everything(second) == expected


def test_missing_rank_leaves_generators_unchanged(tmp_path):
    checkpointer = make_checkpointer(tmp_path)
    path = checkpointer.save(RUNTIME)
    seed_everything(5)
    checkpointer.restore(path, rank=1)
    drawn = random.random()
    seed_everything(5)
    assert random.random() == drawn


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


def optimize(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        sum((p.sin() * (step + 1)).sum() for p in model.parameters()).backward()
        optimizer.step()


def two_layers(seed=0):
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1)}).double()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_restored_by_name_takes_same_steps(make, tmp_path):
    model = two_layers()
    optimizer = make(model.parameters())
    optimize(model, optimizer, 3)
    names = {p: name for name, p in model.named_parameters()}
    save_file(
        dict(optimizer_tensors(RUNTIME.prepare(model, optimizer), names)), tmp_path / "tensors"
    )

    other = two_layers(seed=1)
    other.load_state_dict(model.state_dict())
    # The parameters come in another order: they are told apart by name.
    restored = make(list(other.parameters())[::-1])
    state = read_state(tmp_path / "tensors", dict(other.named_parameters()))
    RUNTIME.prepare(other, restored).load_state(state)
    optimize(model, optimizer, 2)
    optimize(other, restored, 2)
    assert all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_lower_precision_weights_come_from_masters():
    model = two_layers().float()
    model["b"].to(torch.bfloat16)
    trained = RUNTIME.prepare(model, torch.optim.AdamW(model.parameters()))
    parameters = [model["a"].weight, model["b"].weight]
    masters = [torch.full(p.shape, 1.001) for p in parameters]
    bits = model["b"].weight.clone()
    trained.load_state(zip(parameters, ["master", "master"], masters, strict=True))
    assert model["a"].weight.equal(masters[0])
    assert model["b"].weight.equal(bits)  # as the weights were saved
    assert not trained.optimizer.state


def test_checkpoint_contains_no_pickle(tmp_path):
    checkpointer = make_checkpointer(tmp_path)
    train(checkpointer, 1)
    path = checkpointer.save(RUNTIME)
    assert path == tmp_path / "step-00000001"
    names = {file.name for file in path.iterdir()}
    assert {"optimizer.safetensors", "rng-rank0.safetensors", "state.json"} <= names
    assert {file.suffix for file in path.rglob("*")} <= {".json", ".safetensors", ".jinja", ".txt"}
    for file in path.rglob("*.json"):
        json.loads(file.read_text())
    for file in path.rglob("*"):
        assert file.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")


def reference(seed):
    return None if seed is None else Reference(Policy(tiny_model("gpt2", seed=seed)))


@pytest.mark.parametrize(("saved", "present"), [(0, 1), (0, None), (None, 0)])
def test_different_reference_raises_before_any_change(tmp_path, saved, present):
    path = make_checkpointer(tmp_path, reference=reference(saved)).save(RUNTIME)
    checkpointer = make_checkpointer(tmp_path, seed=5, reference=reference(present))
    train(checkpointer, 1)
    before = everything(checkpointer)
    with pytest.raises(ValueError, match="saved by a run with another reference"):
        checkpointer.restore(path, rank=0)
    assert everything(checkpointer) == before


def save_at(checkpointer, step):
    checkpointer.state.step = step
    return checkpointer.save(RUNTIME)


def test_latest_checkpoint_has_largest_step(tmp_path):
    checkpointer = make_checkpointer(tmp_path / "checkpoints")
    assert checkpointer.steps() == []
    tenth = save_at(checkpointer, 10)
    save_at(checkpointer, 9)
    for name in ("partial-step-00000011", "step-12", "step-00000013.old", "step-0000001x"):
        shutil.copytree(tenth, tenth.with_name(name))
    assert checkpointer.steps() == [9, 10]
    checkpointer.resume("latest", RUNTIME)
    assert checkpointer.state.step == 10


def test_saving_step_again_replaces_checkpoint(tmp_path):
    checkpointer = make_checkpointer(tmp_path)
    path = save_at(checkpointer, 4)
    (path / "leftover").touch()
    checkpointer.state.prompt_index = 77
    assert save_at(checkpointer, 4) == path
    assert not (path / "leftover").exists()
    assert json.loads((path / "state.json").read_text())["counters"]["prompt_index"] == 77
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_interrupted_replacement_is_completed_and_leaves_nothing(tmp_path, monkeypatch):
    checkpointer = make_checkpointer(tmp_path / "checkpoints")
    path = save_at(checkpointer, 4)

    def killed(name):
        if name == "save-replace":
            raise KeyboardInterrupt

    checkpointer.state.prompt_index = 77
    monkeypatch.setattr(atomic, "failpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        save_at(checkpointer, 4)
    monkeypatch.undo()
    checkpointer.state.prompt_index = 0
    checkpointer.resume("latest", RUNTIME)
    assert checkpointer.state.prompt_index == 77
    assert list(path.parent.iterdir()) == [path]


def test_removed_checkpoint_is_not_completed_after_a_kill(tmp_path, monkeypatch):
    path = save_at(make_checkpointer(tmp_path), 4)

    def killed(name):
        if name == "pruning":
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "failpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        atomic.remove(path)
    atomic.recover(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choice", [True, "latest", "elsewhere", "model"])
def test_resuming_from_missing_checkpoint_raises(tmp_path, choice):
    checkpointer = make_checkpointer(tmp_path / "checkpoints")
    model_of(checkpointer).save_pretrained(tmp_path / "model")  # without a state
    said = "no complete"
    if choice in ("elsewhere", "model"):
        choice = str(tmp_path / choice)
        said = rf"{choice} has no .*state\.json"
    with pytest.raises(ValueError, match=said):
        checkpointer.resume(choice, RUNTIME)


def test_new_run_over_earlier_checkpoints_raises(tmp_path):
    checkpointer = make_checkpointer(tmp_path)
    checkpointer.resume(None, RUNTIME)  # nothing there yet
    save_at(checkpointer, 3)
    checkpointer.resume(None, RUNTIME)  # its own
    with pytest.raises(ValueError, match="has the checkpoints of an earlier run"):
        make_checkpointer(tmp_path).resume(None, RUNTIME)


def test_resuming_before_later_checkpoints_raises_and_from_newest_goes_on(tmp_path):
    first = make_checkpointer(tmp_path)
    for step in (3, 5):
        save_at(first, step)
    with pytest.raises(ValueError, match=r"later steps, up to step-00000005: move them away"):
        make_checkpointer(tmp_path).resume(str(tmp_path / "step-00000003"), RUNTIME)
    for choice in (True, str(tmp_path / "step-00000005")):
        second = make_checkpointer(tmp_path, seed=1)
        second.resume(choice, RUNTIME)
        assert second.state.step == 5


@pytest.mark.parametrize(("key", "refused"), [("seed", True), ("max_steps", False)])
def test_changed_config_raises_with_key(tmp_path, key, refused):
    save_at(make_checkpointer(tmp_path), 3)
    other = make_checkpointer(tmp_path)
    other.config[key] = 77
    if refused:
        with pytest.raises(ValueError, match="another config: seed was 1 and is 77"):
            other.resume("latest", RUNTIME)
    else:
        other.resume("latest", RUNTIME)
        assert other.state.step == 3
