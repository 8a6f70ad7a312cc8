"""Configs of the runs that prepare for RL: supervised fine-tuning and the reward model."""

from typing import Literal

from rlhf_pg.config import rules
from rlhf_pg.config.fields import Auto, Text, check_inherited, config, option
from rlhf_pg.config.inputs import AdapterConfig, DataConfig, ModelConfig
from rlhf_pg.config.run import SCHEDULES, TrainingConfig


@config
class SupervisedConfig(TrainingConfig, AdapterConfig, DataConfig, ModelConfig):
    """Keys of every supervised run: text, batches, optimizer, checkpoints, trackers."""

    # fmt: off
    algorithm: Text = option("supervised")
    output_dir: Text = option("runs/supervised", help=
        "Directory of the run: the model in final/, metrics on held-out data in metrics.json.")
    dtype: Literal["float32", "bfloat16"] = option("float32", help=
        "Data type of the computation. With bfloat16, weights that are trained stay in float32, "
        "and frozen ones under an adapter are in bfloat16.")

    max_length: int | None = option(None, ge=1, help=
        "Longest text in tokens; None allows as many as the model has positions.")
    append_eos: bool = option(True, help=
        "Append the EOS to texts that are strings; a chat ends as its template says.")

    batch_size: int = option(32, ge=1, help=
        "Examples (of a reward model: pairs) per step, over all processes.")
    micro_batch_size: Auto = option("auto", help=
        "Examples that one process forwards at a time, which never changes the result. auto keeps "
        "a padded batch within 16384 tokens, and its logits within 1 GiB.")
    learning_rate: float = option(2e-05, gt=0, help=
        "Peak learning rate of AdamW; an adapter takes about ten times a whole model's.")
    lr_scheduler_type: Text = option("cosine", names=SCHEDULES, help=
        "Schedule of the learning rate behind its warm-up.")
    warmup_steps: float = option(0.0, ge=0, help=
        "Steps over which the learning rate rises linearly to its peak; below 1, a share of all.")

    eval_steps: int = option(0, ge=0, help=
        "Steps between two evaluations on held-out data; 0 evaluates at the end only.")
    save_steps: int = option(500, ge=0, help=
        "Steps between two checkpoints, checkpoint-N in output_dir; 0 saves none.")
    logging_steps: int = option(10, ge=1, help=
        "Steps between two lines of metrics.jsonl and of trackers.")
    # fmt: on

    def __post_init__(self) -> None:
        check_inherited(self)
        self.report_to = tuple(dict.fromkeys(name for name in self.report_to if name != "none"))
        rules.check_supervised(self)


@config
class SFTConfig(SupervisedConfig):
    """Config of supervised fine-tuning (`recipes/sft.py`)."""

    # fmt: off
    algorithm: Literal["sft"] = option("sft")
    output_dir: Text = option("runs/sft")
    completion_only_loss: bool | None = option(None, help=
        "Learn only the completion of a prompt; None is true where there is a prompt.")
    assistant_only_loss: bool = option(False, help=
        "Learn only the assistant's turns of a chat, by the template's generation tags or else by "
        "rendering it turn by turn.")
    long_examples: Literal["error", "drop", "truncate"] = option("error", help=
        "Refuse examples beyond max_length, drop them, or cut off their ends.")
    packing: bool = option(False, help=
        "Lay the examples of a micro-batch one behind another in one row without padding, each "
        "with positions of its own.")
    label_smoothing: float = option(0.0, ge=0, lt=1, help=
        "Probability spread over the vocabulary, which leaves RL something to explore.")
    # fmt: on


@config
class RewardModelConfig(SupervisedConfig):
    """Config of a reward model trained on preference pairs (`recipes/reward_model.py`)."""

    # fmt: off
    algorithm: Literal["reward_model"] = option("reward_model")
    output_dir: Text = option("runs/reward_model")
    batch_size: int = option(64, ge=1, help="Preference pairs per step, over all processes.")
    learning_rate: float = option(1e-05, gt=0)
    warmup_steps: float = option(0.1, ge=0)
    long_examples: Literal["error", "drop"] = option("error", help=
        "Refuse pairs with texts beyond max_length, or drop them.")
    center_rewards_coefficient: float | None = option(None, gt=0, help=
        "Coefficient of the mean of (r_chosen + r_rejected)^2, which holds rewards around 0; 0.01 "
        "is usual.")
    # fmt: on
