"""What a trainer is given, checked and made ready: model, adapter, prompts."""

import dataclasses
import os
from os import PathLike
from typing import TypeAlias

from datasets import Dataset
from transformers import PreTrainedModel

from rlhf_pg.config import PolicyGradientConfig

Model: TypeAlias = str | PathLike[str] | PreTrainedModel


def resolve(
    args: PolicyGradientConfig, model: Model | None, eval_dataset: Dataset | None
) -> tuple[PolicyGradientConfig, Model]:
    """The model that is meant, and the config with its path and with an absolute `output_dir`: a
    change of the working directory sends nothing elsewhere.

    Raises:
        ValueError: none is named, or there is nothing to evaluate on.
    """
    if args.eval_steps and eval_dataset is None:
        raise ValueError("eval_steps needs an eval_dataset")
    model = model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    args = dataclasses.replace(args, output_dir=os.path.abspath(args.output_dir))
    if isinstance(model, str | PathLike):
        args = dataclasses.replace(args, model_name_or_path=str(model))
    return args, model
