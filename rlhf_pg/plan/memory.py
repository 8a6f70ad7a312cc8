"""Bytes on one process, part by part, while it updates and while it samples, whether they fit, and
changes that would make them fit; the models are built from configs, without reading any weights.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from rlhf_pg.boundary.quoted import about
from rlhf_pg.config import PolicyGradientConfig, PPOConfig
from rlhf_pg.data.inputs import load_named_data, load_task
from rlhf_pg.data.prompts import load_prompts
from rlhf_pg.data.sources import make_prompts
from rlhf_pg.models import loading
from rlhf_pg.models.attention import AttentionSupport, attention_support
from rlhf_pg.models.critic import Critic, assemble, new_critic
from rlhf_pg.models.lm_head import bare, chunk_size_for
from rlhf_pg.models.loading import (
    adapter_of,
    check_code,
    check_directory,
    is_adapter,
    load_policy,
    opening,
    tokenizer_from_pretrained,
    tokenizer_of,
)
from rlhf_pg.models.policy import Policy
from rlhf_pg.plan.duration import hours
from rlhf_pg.rollout.native.continuous_batching import most_rows
from rlhf_pg.run.token_budget import (
    SHARDINGS,
    SHARE,
    Growth,
    Sharding,
    blueprint,
    copy_bytes,
    engine_bytes,
    memory_by_part,
    most,
    of_update,
    vllm_share,
)

META = torch.device("meta")
FOUR_BITS = 0.6  # bytes of a weight in NF4, with its scales and the unquantized layers
CPU_CACHE = 4 * 2**30  # bytes of the native engine's cache on a CPU
BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}
# Keys that save memory, by what they cost; each is tried together with those before it.
SAVINGS: dict[str, Any] = {
    "micro_batch_tokens": "auto",
    "gradient_checkpointing": True,
}
SAVINGS |= {
    "dtype": "bfloat16",
    "optim": "adamw_8bit",
    "beta": 0.0,
    "use_peft": True,
}
OF_ADAPTER = 10  # times the learning rate of all weights
GIB = 2**30


class MetaModels(NamedTuple):
    """The models of a trainer, without data."""

    args: PolicyGradientConfig
    policy: Policy
    critic: Critic | None
    prompt: int  # tokens of the longest prompt
    update: Growth  # memory of a training micro-batch
    teacher: PreTrainedModel | None = None  # unless it is the policy


class Memory(NamedTuple):
    """The bytes of each part, and the tokens and rows that fit beside them."""

    update: dict[str, float]
    rollout: dict[str, float]
    micro_batch_tokens: int
    rows: int  # rows sampled at a time

    @property
    def peak(self) -> float:
        """The bytes of the larger stage."""
        return max(sum(self.update.values()), sum(self.rollout.values()))


def build_meta_models(
    args: PolicyGradientConfig,
    device: torch.device | str,
    kind: str = "cpu",
    memory: float | None = None,
) -> MetaModels:
    """Build the models of a recipe on the meta device; ValueError if there is none.

    Prompts have `max_prompt_length` tokens, or else the longest of the recipe's data. Kernels are
    those of `device`, which is here; the run has a `kind` of device, and GPUs with `memory` bytes.
    """
    args = args.on(kind)
    dtype: torch.dtype = getattr(torch, args.dtype)
    remote = args.trust_remote_code
    adapter = adapter_of(args, None)
    task = None
    prompt = args.max_prompt_length
    if args.task is not None and (args.model_name_or_path is None or not prompt):
        task = load_task(args.task, args.task_options, args.seed)
    if (name := args.model_name_or_path) is None:
        if task is None:
            raise ValueError("no model: write model_name_or_path")
        with META:
            model, tokenizer = task.new_model()
    else:
        with about("model_name_or_path"):
            model = _without_data(name, dtype, AutoModelForCausalLM, remote)
        tokenizer = tokenizer_from_pretrained(name, trust_remote_code=remote)
    if not prompt:  # the longest of the config's data
        data = make_prompts(load_named_data(args, task).train, args, "train_dataset")
        tokenizer_of(args, None, tokenizer)
        prompt = load_prompts(data, tokenizer).longest
    row = prompt + args.max_completion_length
    critic = None
    tokens = most(kind, row) if args.micro_batch_tokens == "auto" else int(args.micro_batch_tokens)
    with META:
        model = load_policy(model, dtype, META, adapter)
        if isinstance(args, PPOConfig):
            value_model: nn.Module | None = None
            if (value_name := args.value_model_name_or_path) is not None:
                with about("value_model_name_or_path"):
                    value_model = _without_data(value_name, dtype, AutoModel, remote)
            critic_options = (
                args.critic == "shared",
                value_model,
                adapter,
                args.critic_seed,
            )
            critic = new_critic(model, tokenizer, dtype, *critic_options)
        chunk_size = chunk_size_for(None if memory is None else int(memory))
        chunk_size //= 3 if args.compares_distributions else 1
        _, module = assemble(model, args, critic, tokens, chunk_size)
    meta: Any = blueprint(module, device, kind)
    policy, critic = (meta, None) if critic is None else (meta.policy, meta.critic)
    update = of_update(meta, args, prompt, torch.device(device), kind)
    teacher = None
    path = args.teacher_model_name_or_path
    if path not in (None, "policy"):
        with about("teacher_model_name_or_path"):
            teacher = _without_data(str(path), dtype, AutoModelForCausalLM, remote)
    return MetaModels(args, policy, critic, prompt, update, teacher)


def _without_data(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    auto_class: Any,
    remote: bool,
) -> PreTrainedModel:
    """Build the model or adapter of a path or Hub id with its tensors on the meta device."""
    check_directory(path)
    with META, opening("model", path):
        if not is_adapter(path):
            check_code(path, remote)
            config = AutoConfig.from_pretrained(
                **loading.location_of(path), trust_remote_code=remote
            )
            model: PreTrainedModel = auto_class.from_config(
                config, dtype=dtype, trust_remote_code=remote
            )
            return model
        adapter = PeftConfig.from_pretrained(str(path))
    base = _without_data(str(adapter.base_model_name_or_path), dtype, auto_class, remote)
    adapter.inference_mode = False
    with META:
        return get_peft_model(base, adapter)


def predict_memory(
    meta: MetaModels, layout: Sharding, processes: int, room: float, kind: str
) -> Memory:
    """Estimate the memory of a process with `room` bytes, for rows of maximal length."""
    args = meta.args
    width = meta.args.max_completion_length
    update, rollout = (
        _weight_bytes(meta, layout, processes, sampling) for sampling in (False, True)
    )
    update["vLLM"] = engine_bytes(args, room)
    left = room - sum(update.values()) if kind == "cuda" else room
    tokens = args.micro_batch_tokens
    row = meta.prompt + width
    if tokens == "auto":
        tokens = max(
            row,
            min(most(kind, row), meta.update.tokens_within(SHARE[kind] * left)),
        )
    draws = math.ceil(math.ceil(args.prompts_per_step / args.num_mini_batches) / processes)
    update["activations"] = meta.update.at(min(int(tokens), draws * meta.update.tokens))
    if args.compares_distributions:  # its hidden states, at every token of the step
        config = (meta.teacher or meta.policy.model).config.get_text_config()
        rows = math.ceil(args.prompts_per_step / processes) * args.num_generations
        wide = next(meta.policy.parameters()).element_size() * config.hidden_size
        update["teacher"] += rows * args.max_completion_length * wide

    serves = args.rollout_engine.startswith("vllm")  # it has the copy, the keys and the values
    if serves:
        rollout["copy to sample from"] = 0.0
    if args.rollout_engine == "vllm":
        sizes = [p.nbytes for p in meta.policy.parameters()]
        if layout.weights:  # gathered one by one
            rollout["copy to sample from"] = float(max(sizes))
        share = vllm_share(args, 1 - sum(rollout.values()) / room)
        vllm_weights = sum(sizes)  # it has them all, too
        if args.vllm_quantization is not None:
            model = meta.policy.model
            head = bare(model).get_output_embeddings()
            for layer in model.modules():
                if isinstance(layer, nn.Linear) and layer is not head:
                    vllm_weights -= layer.weight.nbytes - layer.weight.numel()
        rollout["vLLM"] = max(share * room, float(vllm_weights))
    left = 0.8 * (room - sum(rollout.values())) if kind == "cuda" else CPU_CACHE
    support = AttentionSupport(None) if serves else attention_support(meta.policy.model)
    each = support.bytes_per_token
    groups = math.ceil(args.prompts_per_step / processes)
    cached = args.rollout_cache_tokens or int(max(left, 0.0) // max(each, 1))
    at_a_time = most_rows(room if kind == "cuda" else None)
    fitting = min(at_a_time, (cached - groups * meta.prompt) // width)
    rows = max(1, min(fitting, groups * args.num_generations))
    room_of = [math.ceil(n / 64) * 64 for n in (meta.prompt, width)]  # rounded like the engine's
    groups = math.ceil(rows / args.num_generations)
    of_prompt, of_row = (support.cached_bytes(tokens) for tokens in room_of)
    rollout["keys and values"] = float(groups * of_prompt + rows * of_row)
    rollout["states"] = float(support.bytes_per_row * (groups + rows))
    return Memory(update, rollout, int(tokens), rows)


def _weight_bytes(
    meta: MetaModels, layout: Sharding, processes: int, sampling: bool
) -> dict[str, float]:
    """Return the bytes of policy, critic, reference and teacher, without activations."""
    policy = list(meta.policy.parameters())
    optim = meta.args.optim
    parts = memory_by_part(policy, layout, processes, sampling, optim)
    if meta.args.load_in_4bit:
        frozen = [p for p in policy if not p.requires_grad]
        parts["weights"] -= sum(p.nbytes - FOUR_BITS * p.numel() for p in frozen)
    elif sampling:  # adapters are merged into a copy of their layers
        layers = [m for m in meta.policy.modules() if isinstance(m, BaseTunerLayer)]
        merged = {p for layer in layers for p in layer.get_base_layer().parameters()}
        parts["copy to sample from"] += sum(p.nbytes for p in merged)
    if meta.critic is not None:
        shared = set() if layout.weights else {id(p) for p in policy}
        rest = [p for p in meta.critic.parameters() if id(p) not in shared]
        critic = memory_by_part(rest, layout, processes, sampling, optim)
        critic.pop("copy to sample from", None)  # the critic does not sample
        parts["critic"] = sum(critic.values())
    setup = (layout, processes)
    parts["reference"] = parts["teacher"] = 0.0
    if meta.args.beta > 0:
        parts["reference"] = copy_bytes(meta.args, meta.policy, meta.args.sync_ref_model, *setup)
    if meta.teacher is not None:
        size = sum(p.nbytes for p in meta.teacher.parameters())
        parts["teacher"] = size / (processes if layout.weights else 1)
    elif meta.args.teacher_model_name_or_path is not None:  # the policy
        moves = meta.args.teacher_mixup_alpha > 0
        parts["teacher"] = copy_bytes(meta.args, meta.policy, moves, *setup)
    return parts


def verdict(
    args: PolicyGradientConfig,
    sharding: str,
    processes: int,
    here: torch.device,
    kind: str,
    room: float,
    name: str,
) -> Iterator[Table | Text]:
    """Yield the bytes by part, whether they fit into `room` bytes on each process, and flags with
    which they would: keys first, then more GPUs, and if need be both. Kernels are those of `here`;
    the run has a `kind` of device, called `name`, and a `sharding` of `BY_FLAG`.
    """

    def build(**changes: Any) -> MetaModels:
        chosen = dataclasses.replace(args, **changes)
        return build_meta_models(chosen, here, kind, room if kind == "cuda" else None)

    def estimate(meta: MetaModels, sharding: str, processes: int) -> Memory:
        return predict_memory(meta, BY_FLAG[sharding], processes, room, kind)

    meta = build()
    memory = estimate(meta, sharding, processes)
    spare = (room - memory.peak) / GIB
    where = f"one {name}" if processes == 1 else f"{processes} x {name}"
    sizes = f"{_short(memory.peak / GIB)} of {_short(room / GIB)} GiB"
    yield _table(memory)
    at_a_time = ""
    if not args.rollout_engine.startswith("vllm"):
        at_a_time = f"; {memory.rows} completions sampled at a time by the native engine"
    yield Text(
        f"Prompts of {meta.prompt} and completions of {args.max_completion_length} tokens, the "
        f"longest allowed; micro_batch_tokens {memory.micro_batch_tokens}{at_a_time}."
    )
    if estimated := hours(meta, processes, name):
        yield Text(estimated)
    if spare >= 0:
        yield Text(f"It fits on {where}, with {_short(spare)} GiB to spare: {sizes}.")
        return
    yield Text(
        f"It does not fit on {where}, by {_short(-spare)} GiB: {sizes}. What would make it fit:"
    )
    changes = dict[str, Any]()
    tried = meta
    fits = False
    for key, value in SAVINGS.items():
        if not fits and getattr(args, key) not in (value, "offload"):
            with suppress(ValueError):  # the recipe has a key that forbids this one
                flags = {key: value}
                if key == "use_peft":
                    flags["learning_rate"] = OF_ADAPTER * args.learning_rate
                tried = build(**changes, **flags)
                changes |= flags
                fits = estimate(tried, sharding, processes).peak <= room
    four = tried._replace(args=dataclasses.replace(tried.args, load_in_4bit=True))
    if not fits and sharding == "ddp" and estimate(four, sharding, processes).peak <= room:
        changes["load_in_4bit"] = fits = True
    if fits:
        yield _flags(changes)
    layouts = ("ddp",) if args.load_in_4bit else ("zero2", "zero3")  # 4-bit weights are not sharded
    for flags, built in [({}, meta)] if fits else [({}, meta), (changes, tried)]:
        for count, layout in product((2, 4, 8, 16, 32, 64), layouts):
            if count >= processes and estimate(built, layout, count).peak <= room:
                yield _flags(flags | {"num_processes": count, "sharding": layout})
                return
    if not fits:
        yield Text("  nothing that was tried: take a smaller model")


def _flags(keys: Mapping[str, Any]) -> Text:
    return Text("  " + " ".join(f"--{key} {value}" for key, value in keys.items()))


def _table(memory: Memory) -> Table:
    unit, name = (GIB, "GiB") if memory.peak >= GIB else (2**20, "MiB")
    table = Table(f"{name} on each process", "update", "rollout")
    phases = (memory.update, memory.rollout)
    for part in dict.fromkeys([*memory.update, *memory.rollout]):
        if any(sizes := [phase.get(part, 0.0) for phase in phases]):
            table.add_row(part, *(_short(size / unit) for size in sizes))
    table.add_row("total", *(_short(sum(x.values()) / unit) for x in phases), style="bold")
    return table


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
