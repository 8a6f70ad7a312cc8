"""Keys of a run's inputs: the model and its adapter, the data, the rewards."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.config import files
from rlhf_pg.config.fields import Day, Mapping, Names, Numbers, Split, Text, config, is_set, option

logger = logging.getLogger(__name__)


# fmt: off
@config
class ModelConfig:
    """Keys of the model to start from."""

    model_name_or_path: Text | None = option(None, "inputs", help=
        "Path or Hub id of the model to train. None: the task's own tiny model.")
    trust_remote_code: bool = option(False, "inputs", help=
        "Run code that comes with a model, tokenizer or reward model; refused otherwise.")
    attn_implementation: Text | None = option(None, "run", help=
        "eager, sdpa, flash_attention_2, flex_attention or a Hub kernel. None: the default.")
    model_init_kwargs: Mapping[Any] = option({}, "run", help=
        'Arguments of from_pretrained or fields of the model config, such as {"revision": "main"}.')
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option("auto", "run", help=
        "Data type of weights and computation; bfloat16 updates float32 master weights. "
        "auto: bfloat16 on a GPU, float32 on a CPU, and what it was in a resumed run.")
    gradient_checkpointing: bool | Literal["offload"] = option(False, "cost", help=
        "Recompute activations to save memory; offload also moves layer inputs to the host.")

    def locate(self, recipe_dir: Path | None = None) -> Self:
        """Return the config with absolute file names, looked up beside the recipe first."""
        return replace(self, **files.locate_keys(self, recipe_dir))

    def on(self, device: str, dtype: str | None = None) -> Self:
        """Return the config for a kind of device; on a CPU activations are not offloaded.

        Args:
            dtype: what `dtype: auto` means; by default bfloat16 on a GPU, float32 on a CPU.

        ValueError if the launcher asks for another precision.
        """
        changes: dict[str, Any] = {}
        if self.dtype == "auto":
            changes["dtype"] = dtype or ("float32" if device == "cpu" else "bfloat16")
        if self.gradient_checkpointing == "offload" and device == "cpu":
            logger.warning("gradient_checkpointing: offload is for GPUs; on a CPU it means true")
            changes["gradient_checkpointing"] = True
        check_precision(changes.get("dtype", self.dtype))
        return replace(self, **changes) if changes else self


@config
class AdapterConfig:
    """Keys of a LoRA adapter on frozen weights."""

    use_peft: bool = option(False, "run", help=
        "Train a LoRA adapter on frozen weights, saved in final/.")
    lora_r: int = option(16, "run", ge=1, needs="use_peft", replaced_by="use_peft", help=
        "Rank of the LoRA adapter.")
    lora_alpha: float = option(32.0, "run", gt=0, needs="use_peft", replaced_by="use_peft", help=
        "Scale: output times lora_alpha / lora_r.")
    lora_dropout: float = option(0.0, "update", ge=0, lt=1,
        needs="use_peft and disable_dropout false", replaced_by="use_peft", help=
        "Dropout on the input of the LoRA adapter; it needs disable_dropout: false.")
    lora_target_modules: Names | None = option(None, "run", needs="use_peft",
        replaced_by="use_peft", help=
        "Modules that get an adapter. None: every linear layer except the head.")
    load_in_4bit: bool = option(False, "run", replaced_by="use_peft", help=
        "Load frozen weights in 4 bits (QLoRA, bitsandbytes).")
    save_merged: bool = option(False, "output", help=
        "Save the merged model as well, in final/merged/.")


@config
class DataConfig:
    """Keys of the data: a task by name, or your own datasets."""

    task: Text | None = option(None, "inputs", replaced_by="dataset_name", help=
        "Task with its own data and rewards: arithmetic, preference, guess, calculator, "
        "reasoning_gym:NAME, verifiers:NAME or openenv:URL (docs/your-data.md).")
    task_options: Mapping[Any] = option({}, "inputs", replaced_by="dataset_name task", help=
        "Options of a third-party task, such as size.")
    dataset_name: Names = option((), "inputs", replaced_by="task", help=
        "Datasets to mix: JSONL, JSON, Parquet, CSV or text files, folders, or Hub ids.")
    dataset_config: Text | None = option(None, "inputs", needs="dataset_name or eval_dataset_name",
        replaced_by="dataset_name task", help="Configuration of a Hub dataset, such as main.")
    dataset_train_split: Text = option("train", "inputs", needs="dataset_name",
        replaced_by="dataset_name task", help="Split to train on, such as train[:1000].")
    dataset_test_split: Split = option(None, "evaluation",
        needs="dataset_name or eval_dataset_name", replaced_by="task eval_dataset_name", help=
        "Split to evaluate on, or a share such as 0.05.")
    eval_dataset_name: Names = option((), "evaluation", replaced_by="task", help=
        "Other datasets to evaluate on, each on its own.")
    dataset_weights: Numbers | None = option(None, "run", needs="dataset_name",
        replaced_by="dataset_name task", help="Weights of the mix. None: every row once.")
    dataset_columns: Mapping[Any] = option({}, "inputs", needs="dataset_name or eval_dataset_name",
        replaced_by="task", help=
        'Dataset columns to rename, new name first, such as {"prompt": "question"}.')
    prompt_template: Text | None = option(None, "inputs", replaced_by="task", help=
        'Template of a prompt with columns in braces, such as "Question: {question}".')
    system_prompt: Text | None = option(None, "inputs", help=
        "System message at the start of every prompt.")
    apply_chat_template: bool = option(False, "inputs", help=
        "Turn a text prompt into a chat of one message.")
    chat_template: Text | None = option(None, "inputs", help=
        "Chat template: a file, its text, or the name of one of the tokenizer's. None: its own.")
    chat_template_kwargs: Mapping[Any] = option({}, "run", help=
        'Arguments of the chat template, such as {"enable_thinking": false}.')
    chat_template_date: Day | None = option(None, "inputs", help=
        "Date that templates print, such as 2026-11-29. None: of the run's first start.")
    dataset_fingerprint: Text | None = option(None, "inputs", replaced_by="dataset_name task", help=
        "Fingerprint that the data must have.")

    def refuse_twice(self, argument: str, data: Any, *keys: str) -> None:
        """Raise ValueError if data are given in Python and also named by a key."""
        for key in keys:
            if data is not None and is_set(self, key):
                raise ValueError(f"data are given twice, as {argument} and {key}: leave one out")

    def without_names(self) -> dict[str, Any]:
        """Return the keys that name data, with their defaults."""
        names = ("prompt_template", "system_prompt", "apply_chat_template", "chat_template")
        dates = ("chat_template_kwargs", "chat_template_date")
        kept = (*names, *dates, "dataset_fingerprint")
        return {key: value for key, value in vars(DataConfig()).items() if key not in kept}


@config
class RewardsConfig:
    """Keys of the rewards, by name."""

    reward_funcs: Names = option((), "rewards", help=
        "Rewards by name: my_rewards.py:FUNCTION, package.module:FUNCTION, model:PATH_OR_HUB_ID, "
        "judge:NAME, http://ADDRESS, or a ready-made one such as math (docs/rewards.md).")
    reward_options: Mapping[dict[str, Any]] = option({}, "rewards", replaced_by="reward_funcs",
        help=
        'Options of the rewards by name, such as {"length": {"longest": 200}}.')
    reward_model_name_or_path: Text | None = option(None, "rewards", help=
        "Reward model, the first reward; with reward_weights [1, 0] a task's own is only logged.")
