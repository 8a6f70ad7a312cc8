"""Configs of the runs before RL: supervised fine-tuning and the reward model."""

from typing import Literal

from rlhf_pg.config import rules
from rlhf_pg.config.fields import Auto, Text, config, option
from rlhf_pg.config.inputs import AdapterConfig, DataConfig, ModelConfig
from rlhf_pg.config.run import SCHEDULES, TrainingConfig


# fmt: off
@config
class SupervisedConfig(TrainingConfig, AdapterConfig, DataConfig, ModelConfig):
    """Keys of every supervised run: text, batches, optimizer, checkpoints, trackers."""

    algorithm: Text = option("supervised")
    output_dir: Text = option("runs/supervised", help=
        "Directory of the run: the model in final/, held-out metrics in metrics.json.")

    max_length: int | None = option(None, "run", ge=1, help=
        "Most tokens of a text. None: the model's.")
    append_eos: bool = option(True, "run", help="Append the EOS to texts, but not to chats.")

    batch_size: int = option(32, "run", ge=1, help=
        "Examples or pairs per step, over all processes.")
    micro_batch_tokens: Auto = option("auto", "cost", help=
        "Most tokens per forward pass; never changes the result. auto: as many as speed up "
        "training, at most 16384.")
    learning_rate: float = option(2e-05, "later", gt=0, help=
        "Peak learning rate of AdamW; adapters need about ten times more.")
    lr_scheduler_type: Text = option("cosine", names=SCHEDULES)
    warmup_steps: float = option(0.0, "update", ge=0, help=
        "Steps of warm-up; below 1, a share of all.")

    eval_steps: int = option(0, "evaluation", ge=0, help=
        "Steps between evaluations; 0: at the end only.")
    save_steps: int = option(500, ge=0)
    logging_steps: int = option(10, ge=1)

    def __post_init__(self) -> None:
        rules.check(self)


@config
class SFTConfig(SupervisedConfig):
    """Config of supervised fine-tuning (`recipes/sft.py`)."""

    algorithm: Literal["sft"] = option("sft")
    output_dir: Text = option("runs/sft")
    completion_only_loss: bool | None = option(None, "update", help=
        "Train only on completions, not on prompts. None: if there are prompts.")
    assistant_only_loss: bool = option(False, "update", help=
        "Train only on the assistant's turns of a chat.")
    long_examples: Literal["error", "drop", "truncate"] = option("error", "update", help=
        "Refuse examples longer than max_length, drop them, or truncate them.")
    label_smoothing: float = option(0.0, "update", ge=0, lt=1, help=
        "Probability spread over the vocabulary, which keeps some exploration for RL.")


@config
class RewardModelConfig(SupervisedConfig):
    """Config of a reward model trained on preference pairs (`recipes/reward_model.py`)."""

    algorithm: Literal["reward_model"] = option("reward_model")
    output_dir: Text = option("runs/reward_model")
    batch_size: int = option(64, ge=1, help="Preference pairs per step, over all processes.")
    learning_rate: float = option(1e-05, gt=0)
    warmup_steps: float = option(0.1, ge=0)
    long_examples: Literal["error", "drop"] = option("error", "update", help=
        "Refuse or drop long texts.")
    center_rewards_coefficient: float | None = option(None, "update", gt=0, help=
        "Coefficient of mean((r_chosen + r_rejected)^2), around 0.01: rewards stay near 0.")
