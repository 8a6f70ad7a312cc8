"""The models of a run without their data: built from configs, without reading any weights."""

import os
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_pg import models
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.chat import set_template_arguments
from rlhf_pg.data.prompts import load_prompts
from rlhf_pg.models import Critic, Policy
from rlhf_pg.models.assemble import adapter_of, assembled
from rlhf_pg.plan.footprint import Growth, blueprint, of_update
from rlhf_pg.plan.token_budget import most
from rlhf_pg.tasks import embedded, load_task
from rlhf_pg.tasks.inputs import made_prompts, named_data

META = torch.device("meta")


class MetaModels(NamedTuple):
    """The models that a trainer would have, without data."""

    args: PolicyGradientConfig
    policy: Policy
    critic: Critic | None
    prompt: int  # tokens of the longest
    update: Growth  # of a micro-batch that trains

    @property
    def device(self) -> torch.device:
        """The device on which the models seem to be."""
        return next(self.policy.parameters()).device


def build_meta_models(
    args: PolicyGradientConfig,
    device: torch.device | str,
    kind: str = "cpu",
    memory: float | None = None,
) -> MetaModels:
    """Build the models that a recipe would load or make, on the meta device.

    Args:
        device: the device here, whose kernels are used.
        kind: device of the run, "cuda" or "cpu".
        memory: bytes of each GPU of the run.

    Prompts are as long as `max_prompt_length` says, or else as the longest of the recipe's data.

    Raises:
        ValueError: there is no such model, or a trainer would refuse the config.
    """
    args = args.on(kind)
    tokenizer, model = _model(args)
    dtype: torch.dtype = getattr(torch, args.dtype)
    adapter = adapter_of(args, None)
    prompt = args.max_prompt_length or _longest_prompt(args, tokenizer)
    with META:
        model = models.load_policy(model, dtype, META, adapter)
        critic = _critic(args, model, tokenizer, dtype, adapter)
        row, found = prompt + args.max_completion_length, args.micro_batch_tokens == "auto"
        tokens = most(kind, row) if found else args.token_budget
        chunk_size = models.chunk_size_for(None if memory is None else int(memory))
        _, module = assembled(model, args, critic, tokens, chunk_size)
    meta: Any = blueprint(module, device)
    policy = meta if critic is None else meta.policy
    update = of_update(meta, args, prompt, torch.device(device))
    return MetaModels(args, policy, None if critic is None else meta.critic, prompt, update)


def _longest_prompt(args: PolicyGradientConfig, tokenizer: Any) -> int:
    """Return the tokens of the longest prompt of the data that the config names."""
    task = None if args.task is None else load_task(args.task, args.task_options, args.seed)
    data, _ = named_data(args, task)
    data = made_prompts(data, args, "train_dataset")
    if isinstance(data, IterableDataset):
        raise ValueError("a stream has no known longest prompt: set max_prompt_length")
    set_template_arguments(tokenizer, args.chat_template_kwargs)
    return load_prompts(data, tokenizer).longest


def _model(args: PolicyGradientConfig) -> tuple[Any, PreTrainedModel]:
    """Return tokenizer and model; without a name, those of the task."""
    if args.model_name_or_path is None:
        with META:
            model, tokenizer = embedded(args.task).new_model()
        return tokenizer, model
    dtype: torch.dtype = getattr(torch, args.dtype)
    path = args.model_name_or_path
    with models.about("model_name_or_path"):
        model = without_data(path, dtype, trust_remote_code=args.trust_remote_code)
    return models.tokenizer_from_pretrained(path, trust_remote_code=args.trust_remote_code), model


def without_data(
    path: str | os.PathLike[str],
    dtype: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model or adapter of a path or Hub id with its tensors on the meta device.

    Raises:
        ValueError: there is no such directory, or no model in it.
    """
    models.check_directory(path)
    with META, models.opening("model", path):
        if find_adapter_config_file(str(path)) is None:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            model: PreTrainedModel = auto_class.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
            return model
        adapter = PeftConfig.from_pretrained(str(path))
    base = without_data(str(adapter.base_model_name_or_path), dtype, auto_class, trust_remote_code)
    adapter.inference_mode = False
    with META:
        return get_peft_model(base, adapter)


def _critic(
    args: PolicyGradientConfig,
    model: PreTrainedModel,
    tokenizer: Any,
    dtype: torch.dtype,
    peft: Any,
) -> Critic | None:
    options = args.critic_options
    if options is None:
        return None
    value_model: nn.Module | None = None
    if options.model is not None:
        with models.about("value_model_name_or_path"):
            value_model = without_data(options.model, dtype, AutoModel, args.trust_remote_code)
    return models.new_critic(
        model, tokenizer, dtype, options.shared, value_model, peft, options.random_seed
    )
