"""Models that begin without memory: their files are read tensor by tensor, once they are sharded.

Every module of such a model has a function `stored`, from the name of one of its parameters to the
parameter's value in the files. Copies of the model (a critic, a reference) keep it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def empty_model(
    auto_class: Any,
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attention: Any,
) -> PreTrainedModel | None:
    """Build a model whose parameters are on the meta device; None if its files are not safetensors,
    or have other names than the model, so that `from_pretrained` has to convert them.
    """
    directory = path
    if not Path(path).is_dir():
        directory = snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.py"])
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with without_memory():
        model: PreTrainedModel = auto_class.from_config(
            config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
        )
    names = dict(model.named_parameters()).keys()
    files = files_of(directory)
    # Some parts of these models stay in float32 (experts' biases of DeepSeek-V3).
    keeps = model._keep_in_fp32_modules_strict or model._keep_in_fp32_modules
    if names - files.keys() or (keeps and dtype != torch.float32):
        return None
    for name, buffer in model.named_buffers():
        if name in files:
            buffer.copy_(read(directory, "", name))
    generation = Path(directory) / GENERATION_CONFIG_NAME
    if generation.exists() and model.can_generate():
        fields = json.loads(generation.read_text())
        model.generation_config = GenerationConfig.from_dict(fields)
    model.name_or_path = path
    first = {p: name for name, p in model.named_parameters()}
    tied = {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        part.stored = partial(read, directory, prefix, tied=tied)
    return model


@contextmanager
def without_memory() -> Iterator[None]:
    """Put every parameter that is made inside the block on the meta device, but no buffer."""
    register = nn.Module.register_parameter

    def forget(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # tied ones stay one
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = forget  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored_value(module: nn.Module, name: str) -> Tensor:
    """Read the value of a parameter that is on the meta device from its file, in its dtype."""
    owner, _, leaf = name.rpartition(".")
    part: Any = module.get_submodule(owner)
    dtype = part._parameters[leaf].dtype
    value: Tensor = part.stored(leaf).to(dtype)
    return value


@contextmanager
def zeros_in_place(model: nn.Module) -> Iterator[None]:
    """Show zeros without memory inside the block in place of weights that are not read yet, so that
    adapters are made for weights on the CPU.
    """

    def replace(make: Callable[[nn.Parameter], Tensor]) -> None:
        made = dict[nn.Parameter, nn.Parameter]()  # tied ones stay one
        for part in model.modules():
            if "stored" not in vars(part):
                continue
            for name, old in part._parameters.items():
                if old is None:
                    continue
                if old not in made:
                    made[old] = nn.Parameter(make(old), old.requires_grad)
                part._parameters[name] = made[old]

    replace(lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    try:
        yield
    finally:
        replace(lambda p: p.to("meta"))


def save(
    path: Path | None,
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    most: int,
) -> None:
    """Save a model like `save_pretrained`, with `tensors` in place of its own; see `write`."""
    file = None if path is None else path / SAFE_WEIGHTS_NAME
    write(file, tensors, most, lambda: model.save_pretrained(path, state_dict={}))


def write(
    file: Path | None,
    tensors: Iterable[tuple[str, Tensor]],
    most: int,
    before: Callable[[], Any] = lambda: None,
) -> None:
    """Write tensors as they come to a safetensors file, or only take them, without a file.

    The header has room for `most` tensors, whose dtypes must not grow. An error is raised after the
    last tensor, which other processes may be waiting to send.
    """
    unwritten = iter(tensors)
    try:
        if file is not None:
            before()
            _write(file, unwritten, most)
    finally:
        for _ in unwritten:
            pass


def _write(
    file: Path,
    tensors: Iterator[tuple[str, Tensor]],
    most: int,
) -> None:
    room = 512 * (1 + most)
    end = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    with file.open("wb") as out:
        out.seek(8 + room)
        for name, tensor in tensors:
            data = bytes_of(tensor)
            out.write(data)
            start = end
            end += data.nbytes
            header[name] = {
                "dtype": KINDS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        out.seek(0)
        out.write(room.to_bytes(8, "little"))
        out.write(json.dumps(header).encode().ljust(room))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values, row by row."""
    flat = tensor.detach().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@cache
def files_of(directory: str) -> Mapping[str, Path]:
    """Return the file of every tensor of a model's directory, by its name."""
    folder = Path(directory)
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    if not (file := folder / SAFE_WEIGHTS_NAME).exists():
        return {}
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def read(
    directory: str,
    prefix: str,
    name: str,
    tied: Mapping[str, str] | None = None,
) -> Tensor:
    """Return a tensor of a model's directory, where a `tied` one has another name."""
    name = prefix + name
    if tied:
        name = tied.get(name, name)
    with safe_open(files_of(directory)[name], framework="pt") as file:
        value: Tensor = file.get_tensor(name)
    return value
