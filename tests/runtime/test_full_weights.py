"""A module whose weights lie elsewhere can be had whole, for as long as it is used."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.critic import ActorCritic, new_critic
from rlhf_pg.models.policy import Policy
from rlhf_pg.runtime import FullWeights
from rlhf_pg.runtime.ddp import check_divisible
from rlhf_pg.runtime.fsdp import _set_apart
from rlhf_pg.tasks.tiny import character_tokenizer
from tests.tiny import tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6]])


def adapted(**overrides):
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return add_adapter(tiny_model("qwen3", **overrides), config)


@pytest.mark.parametrize("arch", ["gemma", "gpt2", "qwen3"])
def test_gathered_module_has_current_weights(arch) -> None:
    model = tiny_model(arch)
    whole = FullWeights(model, splits=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)  # after the outline was made
        expected = model(IDS).logits
        with whole.gathered(CPU):
            assert whole.module(IDS).logits.equal(expected)
    assert all(p.is_meta for p in whole.module.parameters())


def test_unsplit_weights_are_not_copied() -> None:
    model = tiny_model("gpt2")
    whole = FullWeights(model, splits=False)
    with whole.gathered(CPU):
        assert whole.module is model
    assert not any(p.is_meta for p in model.parameters())


def test_helper_rank_keeps_no_weights() -> None:
    whole = FullWeights(tiny_model("gpt2"), splits=True)
    with whole.gathered(None):
        assert all(p.is_meta for p in whole.module.parameters())


def test_error_frees_weights() -> None:
    whole = FullWeights(tiny_model("gpt2"), splits=True)
    with pytest.raises(KeyError), whole.gathered(CPU):
        raise KeyError
    assert all(p.is_meta for p in whole.module.parameters())


def test_tied_weights_stay_tied() -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    whole = FullWeights(model, splits=True)
    with whole.gathered(CPU):
        own = whole.module
        assert own.get_input_embeddings().weight is own.get_output_embeddings().weight


def test_only_trained_weights_can_be_gathered() -> None:
    whole = FullWeights(adapted(), splits=True)
    with whole.gathered(CPU, trained=True):
        for name, parameter in whole.module.named_parameters():
            assert parameter.is_meta != ("lora_" in name), name


def test_modified_weights_are_written_back() -> None:
    model = tiny_model("gpt2")
    whole = FullWeights(model, splits=True)
    expected = [p.detach() + 1 for p in model.parameters()]
    with whole.modify():
        for parameter in whole.module.parameters():
            parameter.data = parameter.data + 1
    assert all(p.equal(e) for p, e in zip(model.parameters(), expected, strict=True))


def test_only_shared_frozen_weights_are_separated() -> None:
    policy = adapted(tie_word_embeddings=True)
    critic = new_critic(policy, character_tokenizer("ab"), torch.float32)
    module = ActorCritic(Policy(policy), critic)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    shared = {id(p) for p in policy.parameters()} & {id(p) for p in critic.parameters()}
    assert shared
    trained = [p for p in module.parameters() if p.requires_grad]
    _set_apart(module)
    assert not {id(p) for p in policy.parameters()} & {id(p) for p in critic.parameters()}
    assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    assert [p for p in module.parameters() if p.requires_grad] == trained
    after = dict(module.named_parameters())
    assert all(after[name].equal(value) for name, value in before.items())


def test_quantized_weights_and_used_optimizer_raise() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    check_divisible(model, optimizer)
    quantized = nn.Linear(2, 2)
    quantized.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="4-bit weights are for one process or DDP"):
        check_divisible(quantized, optimizer)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="yours has moments already"):
        check_divisible(model, optimizer)
