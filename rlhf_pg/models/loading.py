"""Load models and tokenizers by path, Hub id or object, and check them before the first step."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import model_info
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.file_download import repo_folder_name
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.quoted import about, quote, show, tell, texts
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.inputs import AdapterConfig, ModelConfig
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data.chat import set_template
from rlhf_pg.models.adapters import add_adapter, check_kind, freeze_unread, is_plain
from rlhf_pg.models.streaming import empty_model, zeros_in_place

Location = str | PathLike[str]  # a directory, a file, or an id of the Hub
POOLER = ("pooler.",)  # an encoder's pooler, which is never used here
ATTENTION = "attn_implementation"
# Arguments of from_pretrained about the location of a model's files, and how they are read.
LOCATION_KEYS = {"revision", "subfolder", "variant"}
READING = {
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "use_safetensors",
    "key_mapping",
}
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
# Keys in which the config of a restored adapter may differ, since they do not change its output.
MAY_DIFFER = {
    "auto_mapping",  # of an adapter without task_type, once it is saved
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
}

if not torch.accelerator.is_available():  # else DeepSpeed would warn that there is none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

logger = logging.getLogger(__name__)


def load_policy(
    model: Location | PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    peft_config: Any = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
    empty: bool = False,
) -> PreTrainedModel:
    """Load a model to train, perhaps with an adapter; ValueError if no weight can be trained.

    If it may be `empty`, its weights stay in their files where possible (`empty_model`).
    """
    empty = empty and (peft_config is None or is_plain(peft_config))
    with about("model_name_or_path") if isinstance(model, str | PathLike) else nullcontext():
        loaded = load_model(
            model,
            dtype,
            AutoModelForCausalLM,
            quantization_config,
            trust_remote_code,
            options,
            empty,
        )
    if not hasattr(loaded, "stored"):
        loaded = loaded.to(device)
    if peft_config is not None:
        with zeros_in_place(loaded):
            loaded = add_adapter(loaded, peft_config)
    freeze_unread(loaded)
    if quantization_config is not None and not isinstance(loaded, PeftModel):
        raise ValueError("4-bit weights cannot be trained: add an adapter (peft_config, use_peft)")
    if not any(parameter.requires_grad for parameter in loaded.parameters()):
        raise ValueError(
            "every weight of the model is frozen: load its adapter with is_trainable=True, or set "
            "use_peft or peft_config"
        )
    return loaded


def adapter_of(args: AdapterConfig, peft_config: Any) -> Any:
    """Return the adapter's config: the given one, or with `use_peft` LoRA (Hu et al. 2021), by
    default on every linear layer except the head.
    """
    if not args.use_peft:
        return peft_config
    if peft_config is not None:
        raise ValueError("there are two adapters: give peft_config or set use_peft, not both")
    return LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=list(args.lora_target_modules or ()) or "all-linear",
        task_type="CAUSAL_LM",
    )


def policy_of(
    model: Location | PreTrainedModel,
    args: PolicyGradientConfig | SupervisedConfig,
    device: torch.device,
    peft_config: Any,
    quantization_config: Any = None,
    empty: bool = False,
) -> PreTrainedModel:
    """Load a model to train by a config, with weights in its dtype."""
    computes: torch.dtype = getattr(torch, args.dtype)
    if args.load_in_4bit and quantization_config is not None:
        raise ValueError("give quantization_config or set load_in_4bit, not both")
    bits = quantization(computes) if args.load_in_4bit else quantization_config
    loaded = load_policy(
        model,
        computes,
        device,
        peft_config,
        bits,
        args.trust_remote_code,
        init_options(args),
        empty,
    )
    if args.save_merged and (bits or not isinstance(loaded, PeftModel)):
        raise ValueError("save_merged is for a model with an adapter on unquantized weights")
    return loaded


def load_model(
    model: Location | PreTrainedModel,
    dtype: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
    empty: bool = False,
) -> PreTrainedModel:
    """Load a model with weights in `dtype`; an object's weights are cast in place.

    Args:
        model: a path or Hub id of a model, or of an adapter, which is loaded on its base model and
            trained further; or an object.
        quantization_config: a `transformers` config, for a path: 4 bits of bitsandbytes.
        trust_remote_code: run code that comes with the model; unset, transformers would ask.
        options: `attn_implementation`, and for a path other arguments of `from_pretrained`; for an
            adapter these apply to its base model.

    Raises:
        ValueError: the model is missing or incomplete; an adapter does not fit its base model; the
            quantization does not work here; an option is unknown, or does not apply to an object.
    """
    options = options or {}
    if quantization_config is not None:
        if not isinstance(model, str | PathLike):
            raise ValueError("quantization_config is for loading: give the model as a path or id")
        if not getattr(quantization_config, "load_in_4bit", False):
            raise ValueError(
                "quantization_config must be a BitsAndBytesConfig with load_in_4bit: in 8 bits a "
                "row's numbers depend on the other rows of its batch"
            )
        if dtype == torch.float64:
            raise ValueError("4-bit weights compute in float32 or bfloat16: change dtype")
    if not isinstance(model, str | PathLike):
        check_kind(model)
        set_options(model, options)
        return _cast(model, dtype)
    name = str(model)
    check_directory(name)
    if is_adapter(name):
        with opening("adapter", name):
            config = PeftConfig.from_pretrained(name)
        if config.task_type == "CAUSAL_LM":
            auto_class = AutoModelForCausalLM
        base = config.base_model_name_or_path
        if not base:
            raise ValueError(
                f"the adapter {name} does not name its base model: set base_model_name_or_path in "
                "adapter_config.json, or load both and give the object"
            )
        try:
            adapted = PeftModel.from_pretrained(
                load_model(
                    base,
                    dtype,
                    auto_class,
                    quantization_config,
                    trust_remote_code,
                    options,
                ),
                name,
                is_trainable=True,
            )
            file = Path(name) / "adapter_model.safetensors"
            if file.exists():  # not on the Hub, nor in an older format
                saved = load_file(file)
                if odd := sorted(saved.keys() ^ peft.get_peft_model_state_dict(adapted).keys()):
                    raise ValueError(  # peft would fill in random tensors
                        f"{len(odd)} tensors are only in the file or the model, such as {odd[0]}"
                    )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # safetensors raises its own class
            reason = " ".join(str(error).split("\n\t")[:2])  # torch would list every tensor
            raise ValueError(
                f"the adapter {name} does not fit its base model {base!r} "
                f"(base_model_name_or_path in adapter_config.json): {reason}"
            ) from error
        check_kind(adapted)
        if has_tokenizer(name):  # the base model's may lack a chat template
            adapted.name_or_path = name
        if (Path(name) / GENERATION_CONFIG_NAME).exists():  # tokens that end a turn
            adapted.get_base_model().generation_config = GenerationConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
        return _cast(adapted, dtype)
    check_options(name, options, trust_remote_code)
    if empty and not (is_gguf(name) or quantization_config or options.keys() - {ATTENTION}):
        with opening("model", name):
            made = empty_model(auto_class, name, dtype, trust_remote_code, options.get(ATTENTION))
        if made is not None:
            return made
    given = {**options, "dtype": dtype, "quantization_config": quantization_config}
    loaded = from_pretrained(
        auto_class, model, POOLER, trust_remote_code=trust_remote_code, **given
    )
    for module in loaded.modules():
        # bitsandbytes (0.50) repacks weights in place for some CPUs, but its backward pass then
        # misreads them: the gradient is 90 % off, without a warning.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return loaded


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast all weights to `dtype`, but trained adapters to at least float32."""
    for parameter in model.parameters():
        # model.to(dtype) would also round the rotary frequencies, which are buffers.
        if parameter.is_floating_point():  # 4-bit weights are stored as bytes
            wide = isinstance(model, PeftModel) and parameter.requires_grad
            own = torch.promote_types(dtype, torch.float32) if wide else dtype
            parameter.data = parameter.data.to(own)
    return model


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Restore in place the weights or the adapter saved by `model.save_pretrained(path)`;
    ValueError if a tensor is missing, or the adapter's config (such as its scale) has changed.
    """
    if isinstance(model, PeftModel):
        saved = PeftConfig.from_pretrained(path).to_dict()
        here = model.active_peft_config.to_dict()
        for key in saved.keys() & here.keys() - MAY_DIFFER:
            if isinstance(here[key], set):  # a list in the file
                saved[key] = set(saved[key] or ())
            if saved[key] != here[key]:
                raise ValueError(
                    f"the adapter in {path} has {key} {saved[key]!r}, but this one {here[key]!r}: "
                    "resume with the same peft_config"
                )
        peft.set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))
    else:
        saved = from_pretrained(
            type(model), path, trust_remote_code=False, dtype=model.dtype, use_safetensors=True
        )
        model.load_state_dict(saved.state_dict())


def from_pretrained(
    auto_class: Any,
    path: Location,
    new: tuple[str, ...] = (),
    *,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedModel:
    """Load a model, and refuse a checkpoint with missing tensors, which would be random.

    Only tensors whose names begin with one of `new`, for a new head, may be missing; ValueError if
    others are, or if loading fails. `auto_class` may be a model's own class.
    """
    model: PreTrainedModel
    where = location_of(path)
    check_code(path, trust_remote_code, options)
    if "gguf_file" in where and hasattr(transformers, "GgufConfig"):  # or it always dequantizes
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with opening("model", path):
        model, info = auto_class.from_pretrained(
            **where, output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
    if "gguf_file" in where:
        logger.info("%s: its GGUF weights are dequantized to %s", path, model.dtype)
        if hasattr(model, "hf_quantizer"):
            model.hf_quantizer.remove_quantization_config(model)
        model.name_or_path = model.config.name_or_path = str(path)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(new))
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} lacks {len(missing)} tensors of a "
            f"{type(model).__name__}, which would be random: {missing[0]} for example. Is it "
            "complete, and of a model of this kind?"
        )
    return model


def is_gguf(path: Location) -> bool:
    """Return whether a path is a GGUF file, which holds model, config and tokenizer."""
    return os.path.isfile(path) and str(path).endswith(".gguf")


def location_of(path: Location) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` finds a directory, Hub id or GGUF file."""
    if not is_gguf(path):
        return {"pretrained_model_name_or_path": path}
    directory, name = os.path.split(path)
    return {"pretrained_model_name_or_path": directory or ".", "gguf_file": name}


def is_adapter(path: Location) -> bool:
    """Return whether a directory or Hub id holds an adapter; ValueError if it cannot be read."""
    with opening("model", path):
        return not is_gguf(path) and find_adapter_config_file(str(path)) is not None


def check_directory(model: Location) -> None:
    """Refuse a path without a model directory, or a Hub id if there is no network (ValueError). A
    name is a path if it cannot be a Hub id, or if it begins with an existing directory.
    """
    name = str(model)
    first = name.partition("/")[0]
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    is_here = not is_path and first != name and os.path.isdir(first)
    if (is_path or is_here) and not os.path.isdir(name) and not is_gguf(name):
        of_hub = "; a model of the Hub with this id has to be downloaded into it" if is_here else ""
        raise ValueError(f"there is no model directory {quote(name)}{of_hub}")
    if not os.path.isdir(name) and not is_gguf(name):
        try:
            if not Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model")).exists():
                model_info(name, timeout=10)
        except (HfHubHTTPError, OfflineModeIsEnabled, ValueError):
            pass  # loading will say why
        except Exception as error:  # loading would try again for a minute
            raise ValueError(
                f"there is no model directory {quote(name)}, and the Hub cannot be reached "
                f"({tell(error)})"
            ) from error


@contextmanager
def opening(what: str, path: Location) -> Iterator[None]:
    """Turn errors in reading a model's files into a ValueError with the path and a remedy."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause = tell(error)
        raise ValueError(
            f"the {what} {show(str(path))} cannot be loaded ({cause}): {_remedy(error, path)}"
        ) from error


def _remedy(error: Exception, path: Location) -> str:
    """Return what to do about an error in reading a model's files."""
    if isinstance(error, ImportError):
        return (
            "install the package that it names, or leave out the key that asks for it, such as "
            "load_in_4bit or attn_implementation"
        )
    if "trust_remote_code" in str(error):
        return "it comes with code of its own: if you trust that, set trust_remote_code: true"
    if isinstance(error, SafetensorError):
        return "a file of its weights is incomplete or damaged: download or copy it again"
    final = f"{quote(f'{path}/final')}, " if os.path.isdir(f"{path}/final") else ""
    return (
        f"give {final}a directory as save_pretrained leaves it, with its config.json, weights and "
        "tokenizer files, a GGUF file (pip install gguf), or the id of one on the Hub"
    )


def init_options(args: ModelConfig) -> dict[str, Any]:
    """Return the config's arguments of `from_pretrained`."""
    attention = {} if args.attn_implementation is None else {ATTENTION: args.attn_implementation}
    return attention | args.model_init_kwargs


def check_options(path: str, options: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse what is neither an argument of `from_pretrained` nor a config field (ValueError)."""
    check_code(path, trust_remote_code, options)
    fields = options.keys() - LOCATION_KEYS - READING - {ATTENTION}
    if not fields:
        return
    location = {key: value for key, value in options.items() if key in LOCATION_KEYS - {"variant"}}
    location |= location_of(path)
    with opening("model", path):
        config = AutoConfig.from_pretrained(trust_remote_code=trust_remote_code, **location)
    known = {*LOCATION_KEYS, *READING, *config.to_dict(), *config.attribute_map}
    if strange := sorted(fields - known):
        key = strange[0]
        raise ValueError(
            f"model_init_kwargs: {show(key)} is neither an argument of from_pretrained nor a "
            f"field of {type(config).__name__}{nearest(key, known)}"
        )


def check_code(
    path: Location, trust_remote_code: bool, options: Mapping[str, Any] | None = None
) -> None:
    """Name the code that may come with a model. Without trust transformers refuses that, but for
    kernels of the Hub, which its config or the options name: ValueError.
    """
    if trust_remote_code:
        user_modules.admit(f"the code of {path}, if it has any (trust_remote_code)", [])
    if trust_remote_code or is_gguf(path):  # a GGUF file has no code
        return
    options = options or {}
    location = {key: value for key, value in options.items() if key in LOCATION_KEYS - {"variant"}}
    with opening("model", path), suppress(OSError):  # of no such file, which loading will say
        config, _ = PreTrainedConfig.get_config_dict(path, **location)
        for keys, kernel in texts([config, options]):
            if "_implementation" in "".join(keys) and "/" in kernel:
                raise ValueError(
                    f"{show(kernel)} is a kernel of the Hub, which is code that trust_remote_code "
                    "allows; or take it out of config.json"
                )


def set_options(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Set the attention of a loaded model; refuse options that are for loading (ValueError)."""
    if others := sorted(options.keys() - {ATTENTION}):
        raise ValueError(
            f"model_init_kwargs ({others[0]}) is for loading: give the model as a path or Hub id"
        )
    if ATTENTION in options:
        with opening("attention of the model", options[ATTENTION]):
            model.set_attn_implementation(options[ATTENTION])


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return QLoRA's config (Dettmers et al. 2023): weights in NF4, computation in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel | None,
    pad_token: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    key: str = "processing_class",
    needs_eos: bool = True,
    eos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or load the one saved beside the model; ValueError if it has no
    EOS or pad token, `eos_token` or `pad_token` is unknown, or ids are beyond the model's embedding
    rows.
    """
    if tokenizer is None:
        path = model.name_or_path if model is not None else ""
        if not path or not has_tokenizer(path):
            where = f" in {path}" if path else ""
            raise ValueError(f"no tokenizer was saved with the model{where}: give it as {key}")
        tokenizer = tokenizer_from_pretrained(
            path, trust_remote_code=trust_remote_code, revision=revision
        )
    if eos_token is not None:
        _check_token("eos_token", eos_token, tokenizer)
        tokenizer.eos_token = eos_token
    if tokenizer.pad_token_id is None and pad_token is not None:
        _check_token("pad_token", pad_token, tokenizer)
        tokenizer.pad_token = pad_token
    eos = tokenizer.eos_token
    id_ = tokenizer.eos_token_id
    # A token that the tokenizer does not have gets the id of the unknown token.
    is_missing = id_ is None or (id_ == tokenizer.unk_token_id and eos != tokenizer.unk_token)
    if needs_eos and is_missing:
        raise ValueError(
            f"the tokenizer has no EOS token{'' if eos is None else ' ' + show(eos)}, so no "
            "completion could end: set eos_token (or processing_class.eos_token) to one of them"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer has no pad token: set pad_token, or {key}.pad_token (the EOS token "
            "will do: padding is masked by position, not by id)"
        )
    if model is not None:
        check_vocabulary(tokenizer, model, key)
    return tokenizer


def _check_token(key: str, token: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if token not in tokenizer.get_vocab():
        near = nearest(token, tokenizer.all_special_tokens)
        raise ValueError(f"{key} {token!r} is not a token of the tokenizer{near}")


def tokenizer_of(
    args: PolicyGradientConfig | SupervisedConfig,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    needs_eos: bool = True,
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or the model's, with the tokens and chat template of a config."""
    tokenizer = load_tokenizer(
        tokenizer,
        model,
        args.pad_token,
        args.trust_remote_code,
        args.model_init_kwargs.get("revision"),
        needs_eos=needs_eos,
        eos_token=args.eos_token,
    )
    set_template(tokenizer, args)
    return tokenizer


def tokenizer_from_pretrained(
    path: Location, *, trust_remote_code: bool, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved at a path or Hub id; ValueError if that fails."""
    check_code(path, trust_remote_code)
    with opening("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **location_of(path), trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    return tokenizer


def check_same_tokens(path: str, tokenizer: PreTrainedTokenizerBase, trust: bool) -> None:
    """Refuse a model whose own tokenizer differs from that of the tokens it reads (ValueError)."""
    own = tokenizer_from_pretrained(path, trust_remote_code=trust)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{path} has another vocabulary than the policy, whose tokens it must read: choose a "
            "model with the same tokenizer"
        )


def has_tokenizer(path: Location) -> bool:
    """Return whether a tokenizer was saved at a path; a Hub id is assumed to have one."""
    here = Path(path)  # without these files, `AutoTokenizer` may make up an empty one
    return not here.is_dir() or any((here / name).exists() for name in TOKENIZER_FILES)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Refuse a tokenizer with an id that has no embedding (ValueError)."""
    rows = model.get_input_embeddings().weight.shape[0]
    token, last = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", -1))
    if last >= rows:
        raise ValueError(
            f"{name}: the token {show(token)} has the id {last} but the model has only {rows} "
            "embedding rows: use the model's tokenizer, or call model.resize_token_embeddings"
        )


def add_stop_tokens(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Make tokens end completions, also of the model as it is saved: its generation config."""
    config = model.generation_config
    known = _eos_token_ids(config)
    config.eos_token_id = sorted({*known, *ids})


def _eos_token_ids(config: Any) -> list[int]:
    ids = getattr(config, "eos_token_id", None)
    if isinstance(ids, int):
        return [ids]
    return list(ids or ())


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all ids that end a completion: the tokenizer's EOS and the generation config's."""
    return sorted({tokenizer.eos_token_id, *_eos_token_ids(model.generation_config)})
