"""The critic against one forward per row, without padding, mask or positions."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.critic import ActorCritic, new_critic
from rlhf_pg.models.loading import load_model
from rlhf_pg.models.policy import Policy
from tests.models.test_loading import make_tokenizer
from tests.models.test_policy import COMPLETIONS, PROMPTS, rollout, with_garbage
from tests.tiny import adapter, stir, tiny_model

# What OPT 350M does: the hidden states leave the decoder in another width.
NARROW = {"word_embed_proj_dim": 16}
ARCHS = [("gpt2", {}), ("llama", {}), ("opt", NARROW)]
KINDS = ["separate", "shared", "lora"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(eos_token="<2>", pad_token="<0>")


@pytest.fixture(autouse=True)
def seeded():
    """New adapters are random."""
    torch.manual_seed(0)


def actor_critic(kind, arch, tokenizer, dtype=torch.float32, **shape):
    """Stirred, so that every number says where it comes from."""
    model = tiny_model(arch, dtype=dtype, **shape)
    if kind == "lora":
        model = stir(add_adapter(model, adapter()))
    critic = new_critic(model, tokenizer, dtype, shared=kind == "shared")
    return ActorCritic(Policy(model), stir(critic, seed=1))


def by_hand(module, prompt, completion):
    """V after each prefix from the whole prompt on, (T+1,), in float64."""
    critic = module.critic
    model = module.policy.model if critic.shares_trunk else critic.model
    trunk = getattr(model, "get_base_model", lambda: model)().base_model
    hidden = trunk(torch.tensor([prompt + completion]), use_cache=False).last_hidden_state[0]
    values = hidden.double() @ critic.head.weight[0].double() + critic.head.bias.double()
    return values[len(prompt) - 1 :]


def assert_values(module, batch, tolerance):
    out, close = module(batch), {"rtol": tolerance, "atol": tolerance}
    assert out.values.shape == batch.completion_ids.shape
    assert out.end_values.shape == (len(PROMPTS),)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected, n = by_hand(module, prompt, completion), len(completion)
        mask = batch.action_mask[i]
        shown = torch.where(mask[:n], expected[:-1], 0.0)
        torch.testing.assert_close(out.values[i, :n].double(), shown, **close)
        assert not out.values[i, n:].any()
        last = int(mask.nonzero().max()) + 1 if mask.any() else 0
        end = out.end_values[i].double()
        torch.testing.assert_close(end, expected[last], **close)


def places(module):
    """Where the frozen tensors of a module are, and where the trained ones."""
    found = {False: set(), True: set()}
    for parameter in module.parameters():
        found[parameter.requires_grad].add(parameter.data_ptr())
    return found[False], found[True]


def trained_names(module):
    return {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("arch", "shape"), ARCHS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_values_match_unpadded_forward(kind, arch, shape, tokenizer):
    dtype, tolerance = (torch.float64, 1e-9) if arch == "gpt2" else (torch.float32, 1e-4)
    module = actor_critic(kind, arch, tokenizer, dtype, **shape)
    for left, right in ((0, 0), (5, 3)):
        assert_values(module, with_garbage(rollout(left=left, right=right)), tolerance)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_mask_holes_are_attended_but_not_valued(kind, tokenizer):
    """Tool output: the state after the last action is the end, whatever else follows it."""
    module = actor_critic(kind, "gpt2", tokenizer, torch.float64)
    mask = rollout().completion_mask.clone()
    mask[1, 1:3] = mask[1, 4] = mask[3, 0] = False
    mask[2] = False  # nothing in it was chosen
    batch = replace(rollout(left=2), action_mask=mask)
    assert_values(module, batch, 1e-9)
    end, said = module(batch).end_values, batch.completion_ids.clone()
    said[1, 4] = 20  # after the last action
    assert module(replace(batch, completion_ids=said)).end_values.equal(end)
    said[1, 2] = 20  # before it
    assert (module(replace(batch, completion_ids=said)).end_values - end)[1].abs() > 1e-3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("separate", torch.bfloat16), ("shared", torch.float64), ("lora", torch.bfloat16)],
)
@torch.no_grad()
def test_initial_values_are_zero_in_at_least_float32(kind, dtype, tokenizer):
    model = tiny_model("llama", dtype=dtype)
    model = add_adapter(model, adapter()) if kind == "lora" else model
    critic = new_critic(model, tokenizer, dtype, shared=kind == "shared")
    out = ActorCritic(Policy(model), critic)(rollout())
    wide = torch.promote_types(dtype, torch.float32)
    assert critic.head.weight.dtype == critic.head.bias.dtype == wide
    assert out.values.dtype == out.end_values.dtype == wide
    assert not out.values.any()
    assert not out.end_values.any()


@torch.no_grad()
def test_undefined_values_stay_in_masked_slots():
    class Undefined(nn.Module):
        def forward(self, input_ids, **_):
            return torch.where(input_ids == 0, torch.nan, 1.0)  # 0 pads

    critic = new_critic(tiny_model("gpt2"), None, torch.float32, value_model=Undefined())
    values, end = critic(rollout(left=2, right=2))
    assert values.equal(rollout(right=2).action_mask.float())
    assert end.equal(torch.ones(4))


@pytest.mark.parametrize("kind", KINDS)
def test_blank_row_gives_zero_gradient_to_trained_weights(kind, tokenizer):
    module = actor_critic(kind, "llama", tokenizer)
    out = module(rollout().blank_row())
    (out.logprobs.sum() + out.values.sum()).backward()
    trained = [p for p in module.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


@pytest.mark.parametrize("kind", ["separate", "lora"])
@torch.no_grad()
def test_separate_critic_starts_with_policy_hidden_states(kind, tokenizer):
    model = tiny_model("llama")
    model = stir(add_adapter(model, adapter())) if kind == "lora" else model
    critic = new_critic(model, tokenizer, torch.float32)
    nn.init.normal_(critic.head.weight)
    shared = new_critic(model, tokenizer, torch.float32, shared=True)
    shared.head.load_state_dict(critic.head.state_dict())
    expected = ActorCritic(Policy(model), shared)(rollout(left=2))
    values, end = critic(rollout(left=2))
    assert values.equal(expected.values)
    assert end.equal(expected.end_values)


@pytest.mark.parametrize("kind", KINDS)
def test_policy_and_critic_share_only_frozen_weights(kind, tokenizer):
    module = actor_critic(kind, "llama", tokenizer)
    frozen, trained = places(module.policy)
    critics_frozen, critics_trained = places(module.critic)
    assert trained.isdisjoint(critics_frozen | critics_trained)
    assert critics_trained
    assert critics_frozen == (frozen if kind == "lora" else set())


@pytest.mark.parametrize("where", ["copy", "object"])
def test_lora_critic_trains_own_adapter_but_no_lm_head(where, tokenizer):
    """The policy's adapter may be on that head too, which takes no part in a value."""
    config = adapter(target_modules=["q_proj", "lm_head"])
    model = add_adapter(tiny_model("llama"), config)
    other = None if where == "copy" else add_adapter(tiny_model("llama"), config)
    critic = new_critic(model, tokenizer, torch.float32, value_model=other)
    module = ActorCritic(Policy(model), stir(critic))
    out = module(rollout())
    (out.logprobs.sum() + out.values.sum()).backward()
    assert sum("q_proj" in name for name in trained_names(critic)) == 4
    assert len(trained_names(critic)) == 4 + 2
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    assert sum("lm_head.lora" in name for name in trained_names(model)) == 2


class Table(nn.Module):
    """Values straight from ids and positions."""

    def __init__(self, wide=False):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(0)))
        self.tied = self.table  # one tensor by two names
        self.wide = wide

    def forward(self, input_ids, attention_mask, position_ids):
        values = self.table[input_ids] + position_ids / 8 + attention_mask / 16
        return values[:, :, None] if self.wide else values


def reward_model():
    config = tiny_model("llama").config
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.mark.parametrize("wide", [False, True])
@torch.no_grad()
def test_custom_module_gives_values_directly(wide):
    module = Table(wide)
    critic = new_critic(tiny_model("gpt2"), None, torch.float32, value_model=module)
    assert critic.model is module
    assert critic.head is None
    values, end = critic(rollout(left=3, right=1))
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        row = [module.table[id] + t / 8 + 1 / 16 for t, id in enumerate(prompt + completion)]
        expected = torch.stack(row[len(prompt) - 1 :])
        assert values[i, : len(completion)].equal(expected[:-1])
        assert end[i] == expected[-1]


def test_module_without_one_value_per_token_raises():
    class Odd(nn.Module):
        def forward(self, **_):
            return torch.zeros(4, 12, 2)

    critic = new_critic(tiny_model("gpt2"), None, torch.float32, value_model=Odd())
    with pytest.raises(ValueError, match=r"value_model must give one value per token, \(4, 12\)"):
        critic(rollout())


@pytest.mark.parametrize("given", ["path", "causal", "scores"])
@torch.no_grad()
def test_value_model_trunk_gets_zero_head(given, tokenizer, tmp_path):
    other = reward_model() if given == "scores" else tiny_model("gpt2", hidden_size=16)
    hidden = other.base_model(torch.tensor([[5, 9, 2]])).last_hidden_state
    other.save_pretrained(tmp_path)
    value_model = str(tmp_path) if given == "path" else other
    critic = new_critic(tiny_model("llama"), tokenizer, torch.float32, value_model=value_model)
    assert critic.model(torch.tensor([[5, 9, 2]])).last_hidden_state.equal(hidden)
    assert not critic.head.weight.any()
    assert critic.model is not other.base_model  # the object is left alone
    assert all(p.requires_grad for p in critic.parameters())


@pytest.mark.parametrize("loaded", [False, True])
def test_lora_value_model_has_adapter_in_every_layer(loaded, tokenizer, tmp_path):
    """One more than the policy has, although a loaded adapter names the policy's layers."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = add_adapter(load_model(tmp_path / "base", torch.float32), adapter())
    model.save_pretrained(tmp_path / "adapter")
    model = load_model(tmp_path / "adapter", torch.float32) if loaded else model
    other, config = tiny_model("llama", num_hidden_layers=3), None if loaded else adapter()
    weights = {p.data_ptr() for p in other.parameters()}
    critic = new_critic(model, tokenizer, torch.float32, value_model=other, peft_config=config)
    trained = trained_names(critic) - {"head.weight", "head.bias"}
    assert len(trained) == 3 * 7 * 2
    assert all(".lora_" in name for name in trained)
    assert not places(critic)[0] & weights  # the object is left alone


@pytest.mark.parametrize("kind", ["separate", "lora"])
@torch.no_grad()
def test_saved_critic_loads_with_its_head(kind, tokenizer, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32)
    model = add_adapter(model, adapter()) if kind == "lora" else model
    earlier = stir(new_critic(model, tokenizer, torch.float32))
    earlier.save(tmp_path / "critic")
    path = str(tmp_path / "critic")
    critic = new_critic(tiny_model("qwen3"), tokenizer, torch.float32, value_model=path)
    for now, then in zip(critic(rollout()), earlier(rollout()), strict=True):
        assert now.equal(then)
    assert trained_names(critic) == trained_names(earlier)


def saved_kind(kind, tokenizer):
    """A critic of each kind that is saved in its own way, with the policy."""
    model, other, config = tiny_model("gpt2"), None, None
    if kind == "lora":
        model = add_adapter(model, adapter())
    if kind == "module":
        other = Table()
    if kind == "value model with lora":
        other, config = tiny_model("llama"), adapter()
    torch.manual_seed(0)
    critic = new_critic(model, tokenizer, torch.float32, kind == "shared", other, config)
    return ActorCritic(Policy(model), critic)


@pytest.mark.parametrize("kind", ["shared", "lora", "module", "value model with lora"])
@torch.no_grad()
def test_saved_weights_are_restored_in_place(kind, tokenizer, tmp_path):
    earlier, module = saved_kind(kind, tokenizer), saved_kind(kind, tokenizer)
    stir(earlier.critic).save(tmp_path / "critic")
    assert not module(rollout()).values.equal(earlier(rollout()).values)
    where = [p.data_ptr() for p in module.critic.parameters()]
    module.critic.restore(tmp_path / "critic")
    assert [p.data_ptr() for p in module.critic.parameters()] == where
    theirs = dict(earlier.critic.named_parameters())
    assert all(theirs[name].equal(p) for name, p in module.critic.named_parameters())
    assert module(rollout()).values.equal(earlier(rollout()).values)


def test_value_model_with_fewer_embedding_rows_raises(tokenizer):
    small = tiny_model("llama", vocab_size=39)
    with pytest.raises(ValueError, match=r"value_model: .* the model has only 39 embedding rows"):
        new_critic(tiny_model("llama"), tokenizer, torch.float32, value_model=small)


def test_value_model_with_different_vocabulary_raises(tokenizer, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    make_tokenizer(eos_token="<2>", pad_token="<0>").save_pretrained(tmp_path)
    model, path = tiny_model("llama"), str(tmp_path)
    new_critic(model, tokenizer, torch.float32, value_model=path)
    backwards = Tokenizer(models.WordLevel({f"<{i}>": 39 - i for i in range(40)}))
    PreTrainedTokenizerFast(tokenizer_object=backwards).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"value_model .* has another vocabulary than the policy"):
        new_critic(model, tokenizer, torch.float32, value_model=path)


def test_value_model_sharing_trained_weights_raises(tokenizer):
    def refused(model, value_model):
        with pytest.raises(ValueError, match="value_model is the policy"):
            new_critic(model, tokenizer, torch.float32, value_model=value_model)

    model, base = tiny_model("llama"), tiny_model("llama")
    refused(model, model)
    refused(model, model.model)
    refused(model, nn.Sequential(model.model.embed_tokens, nn.Linear(32, 1)))
    refused(add_adapter(base, adapter()), base)
