"""Models and tokenizers by path and by object, and what is checked about them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_pg.models.loading import load_model, load_tokenizer, load_weights, opening, stop_token_ids
from rlhf_pg.models.policy import disable_dropout
from tests.tiny import tiny_model

IDS = torch.tensor([[5, 9, 3, 31, 17, 8]])


def make_tokenizer(size=40, **special):
    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def saved(tmp_path):
    """A directory with a model, and a tokenizer with pad and EOS."""
    tiny_model("llama").save_pretrained(tmp_path)
    make_tokenizer(eos_token="<2>", pad_token="<0>").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("dtype", "mapped"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_in_file_dtype_are_memory_mapped(saved, dtype, mapped):
    """Processes of one machine share them, until they are shared out."""
    model = load_model(saved, dtype)
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{saved}/model.safetensors" in line:
            ranges.append([int(end, 16) for end in line.split()[0].split("-")])
    for name, parameter in model.named_parameters():
        there = any(low <= parameter.data_ptr() < high for low, high in ranges)
        assert there == mapped, name


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_implementation": "a/b"},
        {"_attn_implementation": {"": "eager", "text_config": "a/b"}},
        {"text_config": {"experts_implementation": "a/b@main:f"}},
    ],
)
def test_kernel_of_config_is_code(saved, keys):
    file = Path(saved) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    for load in (
        load_model,
        lambda path, _: load_tokenizer(None, SimpleNamespace(name_or_path=path)),
    ):
        with pytest.raises(ValueError, match=r"a/b.* is a kernel of the Hub, .* trust_remote_code"):
            load(saved, torch.float32)


def without(path, *names):
    """The checkpoint, less some of its tensors."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for name in names:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})


def test_checkpoint_lacking_tensor_raises(saved):
    model = load_model(saved, torch.float32)
    without(saved, "model.layers.1.mlp.down_proj.weight")
    for kind in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=r"lacks 1 tensors of a Llama\w+, .*mlp.down_"):
            load_model(saved, torch.float32, kind)
    with pytest.raises(ValueError, match="lacks 1 tensors of a LlamaForCausalLM"):
        load_weights(model, Path(saved))


def config_of(**changes):
    def change(path):
        whole = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(whole))

    return change


def writes(name, content):
    return lambda path: (path / name).write_bytes(content)


def half_of_the_weights(path):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


ADAPTER = writes(
    "adapter_config.json", b'{"peft_type": "LORA", "base_model_name_or_path": "./nowhere", "r": 2}'
)


def nothing_but_a_tokenizer(path):
    (path / "model.safetensors").unlink()
    (path / "config.json").unlink()


def directory_of_a_run(path):
    nothing_but_a_tokenizer(path)
    (path / "final").mkdir()


# What is done to a directory, and what is said of it.
NO_MODELS = {
    "only a tokenizer": (nothing_but_a_tokenizer, r"Unrecognized model.*config.json"),
    "a run": (directory_of_a_run, r"\w/final, "),
    "endless lists": (writes("config.json", b"[" * 100_000), "cannot be loaded .RecursionError"),
    "an unknown type": (config_of(model_type="frob"), "cannot be loaded .ValueError: .*`frob`"),
    "other weights": (config_of(num_attention_heads=8, head_dim=8), "cannot be loaded .Runtime"),
    "half of the weights": (half_of_the_weights, "cannot be loaded .SafetensorError"),
    "an adapter that is a list": (writes("adapter_config.json", b"[]"), "adapter .*TypeError"),
    "an adapter on nothing": (ADAPTER, r"no model directory \./nowhere"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_incomplete_model_directory_is_one_error(saved, name):
    damage, said = NO_MODELS[name]
    damage(Path(saved))
    with pytest.raises(ValueError, match=said) as caught:
        load_model(saved, torch.float32)
    assert saved in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("the package flash_attn seems to be not installed"), "install the package"),
        (ValueError("set the option `trust_remote_code=True`"), "trust_remote_code: true"),
        (SafetensorError("incomplete metadata"), "download or copy it again"),
        (OSError("no file named config.json"), "as save_pretrained leaves it"),
    ],
)
def test_error_in_reading_has_remedy_of_its_cause(error, remedy):
    with pytest.raises(ValueError, match=remedy), opening("model", "there"):
        raise error


def test_unreadable_tokenizer_is_one_error(saved):
    (Path(saved) / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(ValueError, match=r"^the tokenizer '.*cannot be loaded"):
        load_tokenizer(None, load_model(saved, torch.float32))


@pytest.mark.parametrize("name", ["", "nobody/nothing", "\x1b[2J"])
def test_unknown_hub_name_is_one_error(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^the model '.*cannot be loaded .OSError") as caught:
        load_model(name, torch.float32)
    assert "\x1b" not in str(caught.value)


def test_without_a_network_a_hub_name_is_one_error_at_once(monkeypatch):
    def unreachable(*_, **__):
        raise RuntimeError("no network")

    monkeypatch.setattr("rlhf_pg.models.loading.model_info", unreachable)
    with pytest.raises(ValueError, match=r"no model directory nobody/nothing, .*no network"):
        load_model("nobody/nothing", torch.float32)


def test_out_of_memory_error_is_passed_on(saved, monkeypatch):
    def starved(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", starved)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(saved, torch.float32)


def test_trunk_needs_no_head_and_tied_weights_load(saved):
    without(saved, "lm_head.weight")
    assert load_model(saved, torch.float32, AutoModel).dtype == torch.float32
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(saved)
    load_model(saved, torch.float32)
    with pytest.raises(ValueError, match=r"lacks 1 tensors .* score.weight for example"):
        load_model(saved, torch.float32, AutoModelForSequenceClassification)


# Constants that a model computes in its dtype (Gemma's scale) have float32 digits in an object.
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.0), (torch.float64, 1e-5)])
@pytest.mark.parametrize("arch", ["gemma", "llama", "gpt_neox"])
@torch.no_grad()
def test_model_by_path_matches_model_by_object(tmp_path, arch, dtype, atol):
    model = tiny_model(arch, max_position_embeddings=512)
    model.save_pretrained(tmp_path)
    by_path, by_object = load_model(str(tmp_path), dtype), load_model(model, dtype)
    assert by_object is model
    assert {p.dtype for p in (*by_path.parameters(), *by_object.parameters())} == {dtype}
    ids = IDS.repeat(1, 50)
    logits = by_object.eval()(ids).logits
    torch.testing.assert_close(logits, by_path.eval()(ids).logits, rtol=0, atol=atol)


def test_quantized_weights_are_not_cast():
    model = tiny_model("gpt2")
    packed = torch.arange(3, dtype=torch.uint8)
    model.packed = torch.nn.Parameter(packed, requires_grad=False)
    assert load_model(model, torch.bfloat16).packed.dtype == torch.uint8


@pytest.mark.fault(44, "refused; pad_token names another")
@pytest.mark.parametrize(
    ("special", "pad_token", "message"),
    [
        ({"pad_token": "<0>"}, None, "no EOS token.*processing_class.eos_token"),
        ({"eos_token": "<2>"}, None, "no pad token.*set pad_token"),
        ({"eos_token": "<2>"}, "not in the vocabulary", "not in the vocabulary. is not a token"),
        ({}, "<0>", "no EOS token"),
    ],
)
def test_tokenizer_without_pad_or_eos_raises(special, pad_token, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(make_tokenizer(**special), tiny_model("gpt2"), pad_token)


@pytest.mark.parametrize(("own", "given", "expected"), [(None, "<2>", 2), ("<0>", "<2>", 0)])
def test_pad_token_key_applies_only_without_own_pad(own, given, expected):
    tokenizer = make_tokenizer(eos_token="<2>", pad_token=own)
    assert load_tokenizer(tokenizer, tiny_model("gpt2"), given).pad_token_id == expected


@pytest.mark.fault(45, "refused")
def test_more_token_ids_than_embedding_rows_raise():
    tokenizer = make_tokenizer(40, eos_token="<2>", pad_token="<0>")
    assert load_tokenizer(tokenizer, tiny_model("gpt2", vocab_size=40)) is tokenizer
    tokenizer = make_tokenizer(41, eos_token="<2>", pad_token="<0>")
    with pytest.raises(ValueError, match="has the id 40 but the model has only 40 embedding rows"):
        load_tokenizer(tokenizer, tiny_model("gpt2", vocab_size=40))


GAPS = {"1": 0, "2": 1, "<0>": 20, "<2>": 30}


def with_gaps(**more):
    backend = Tokenizer(models.WordLevel(GAPS | more))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<2>", pad_token="<0>")


@pytest.mark.parametrize("token", ["3", "<2>"])
def test_token_id_beyond_embedding_rows_raises(token):
    fits, beyond = with_gaps(**{token: 39}), with_gaps(**{token: 40})
    assert load_tokenizer(fits, tiny_model("gpt2", vocab_size=40)) is fits
    said = f"^processing_class: the token '{token}' has the id 40 but the model has only 40 embed"
    with pytest.raises(ValueError, match=said):
        load_tokenizer(beyond, tiny_model("gpt2", vocab_size=40))


def test_unknown_token_as_eos_raises():
    tokenizer = make_tokenizer(eos_token="<2>", pad_token="<0>")
    tokenizer.backend_tokenizer.model = models.WordLevel(GAPS | {"<7>": 7}, unk_token="<7>")
    tokenizer.unk_token, tokenizer.eos_token = "<7>", "</s>"
    with pytest.raises(ValueError, match=r"no EOS token '</s>', .*processing_class.eos_token"):
        load_tokenizer(tokenizer, tiny_model("gpt2"))
    tokenizer.eos_token = "<7>"  # as GPT-2 has it
    assert load_tokenizer(tokenizer, tiny_model("gpt2")).eos_token_id == 7


@pytest.mark.parametrize(
    ("configured", "stops"), [(None, [2]), (7, [2, 7]), ([9, 2, 7], [2, 7, 9])]
)
def test_eos_of_tokenizer_and_generation_config_stop(configured, stops):
    model = tiny_model("gpt2")
    model.generation_config.eos_token_id = configured
    tokenizer = make_tokenizer(eos_token="<2>", pad_token="<0>")
    assert stop_token_ids(model, tokenizer) == stops


# Every rate of a config by itself: switching off the others does not help it.
RATES = [
    *(("gpt2", name) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    *(("gpt_neox", name) for name in ("hidden_dropout", "attention_dropout")),
    *(("opt", name) for name in ("dropout", "attention_dropout", "layerdrop")),
    ("llama", "attention_dropout"),
]


@pytest.mark.parametrize(("arch", "name"), RATES)
@torch.no_grad()
def test_disabled_dropout_makes_train_mode_match_eval(arch, name):
    torch.manual_seed(0)
    rates = {rate: 0.0 for a, rate in RATES if a == arch} | {name: 0.5}
    attention = "eager" if arch == "llama" else "sdpa"
    model = tiny_model(arch, **rates, attn_implementation=attention).train()
    assert not model(IDS).logits.equal(model(IDS).logits)
    disable_dropout(model)
    trained = [model(IDS).logits for _ in range(3)]
    assert model.training
    expected = model.eval()(IDS).logits
    for logits in trained:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
