"""Configs of the runs that prepare for RL: supervised fine-tuning and the reward model."""

from typing import Literal

from rlhf_pg.config import rules
from rlhf_pg.config.fields import Auto, Text, check_inherited, config, option
from rlhf_pg.config.inputs import AdapterConfig, DataConfig, ModelConfig
from rlhf_pg.config.run import SCHEDULES, Trackers


@config
class SupervisedConfig(AdapterConfig, DataConfig, ModelConfig):
    """Keys of every supervised run: text, batches, optimizer, checkpoints, trackers."""

    # fmt: off
    algorithm: Text = option("supervised", help=
        "Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it.")
    output_dir: Text = option("runs/supervised", help=
        "Directory for everything that the run writes: the model is in `final/`, its metrics on "
        "held-out data in `metrics.json`.")
    resume_from_checkpoint: Text | None = option(None, help=
        'Checkpoint directory to resume from, or "latest" for the newest one in output_dir.')
    seed: int = option(42, ge=0, le=2 ** 32 - 1, help=
        "Seed of the order of examples, and of weights that are new.")
    dtype: Literal["float32", "bfloat16"] = option("float32", help=
        "Data type of the computation. With bfloat16, trained weights stay in float32, and the "
        "frozen ones under an adapter are in bfloat16.")
    disable_dropout: bool = option(True, help=
        "Train without dropout. False keeps the model's own rates.")

    pad_token: Text | None = option(None, help=
        "Pad token for a tokenizer that has none; the EOS token will do.")
    max_length: int | None = option(None, ge=1, help=
        "Longest text in tokens; None allows as many as the model has positions.")
    append_eos: bool = option(True, help=
        "Append the EOS to texts that are strings, as a policy ends them; a chat ends as its "
        "template says.")

    num_train_epochs: float = option(1.0, gt=0, help=
        "Passes over the data, if max_steps is -1.")
    max_steps: int = option(-1, ge=-1, help=
        "Number of optimizer steps; -1 goes by num_train_epochs.")
    batch_size: int = option(32, ge=1, help=
        "Examples (of a reward model: pairs) per step, over all processes.")
    micro_batch_size: Auto = option("auto", help=
        "Examples that one process forwards at a time; lower it if memory runs out. It never "
        "changes the result. auto takes as many as keep the padded batch within 16384 tokens, "
        "and its logits in float32 within 1 GiB.")
    learning_rate: float = option(2e-05, gt=0, help=
        "Peak learning rate of AdamW; an adapter takes about ten times that of a whole model.")
    lr_scheduler_type: Text = option("cosine", names=SCHEDULES, help=
        "Schedule of the learning rate behind its warm-up.")
    warmup_steps: float = option(0.0, ge=0, help=
        "Steps over which the learning rate rises linearly to its peak; below 1, a share of "
        "all.")
    weight_decay: float = option(0.0, ge=0, help=
        "Weight decay of AdamW; biases and norms do not decay.")
    max_grad_norm: float = option(1.0, ge=0, help=
        "Global norm to which the gradient is clipped; 0 does not clip.")

    eval_steps: int = option(0, ge=0, help=
        "Steps between two evaluations on held-out data; 0 evaluates at the end only.")
    save_steps: int = option(500, ge=0, help=
        "Steps between two checkpoints, checkpoint-N in output_dir; 0 saves none.")
    save_total_limit: int | None = option(2, ge=1, help=
        "Number of checkpoints to keep, the newest; None keeps all.")
    logging_steps: int = option(10, ge=1, help=
        "Steps between two lines of metrics.jsonl and of trackers.")
    report_to: Trackers = option((), help=
        "Trackers that get the lines of metrics.jsonl as well, by the callbacks of "
        "transformers.")
    run_name: Text | None = option(None, help=
        "Name of the run in W&B and trackio; None leaves it to them.")
    # fmt: on

    def __post_init__(self) -> None:
        check_inherited(self)
        self.report_to = tuple(dict.fromkeys(name for name in self.report_to if name != "none"))
        rules.check(self, rules.OF_SUPERVISED)


@config
class SFTConfig(SupervisedConfig):
    """Config of supervised fine-tuning (`recipes/sft.py`)."""

    # fmt: off
    algorithm: Literal["sft"] = option("sft")
    output_dir: Text = option("runs/sft")
    completion_only_loss: bool | None = option(None, help=
        "Learn only the completion of a prompt. None is true where there is a prompt; false "
        "learns the prompt too.")
    assistant_only_loss: bool = option(False, help=
        "Learn only the assistant's turns of a chat, as the template's generation tags mark "
        "them, or else as rendering the chat turn by turn tells them apart.")
    long_examples: Literal["error", "drop", "truncate"] = option("error", help=
        "Refuse data with examples beyond max_length, drop these examples, or cut off their "
        "ends.")
    packing: bool = option(False, help=
        "Lay the examples of a micro-batch one behind another in one row without padding, each "
        "with positions of its own. Refused where the model's attention mixes them.")
    label_smoothing: float = option(0.0, ge=0, lt=1, help=
        "Probability spread over the vocabulary, so that the model leaves RL answers to "
        "explore.")
    # fmt: on


@config
class RewardModelConfig(SupervisedConfig):
    """Config of a reward model trained on preference pairs (`recipes/reward_model.py`)."""

    # fmt: off
    algorithm: Literal["reward_model"] = option("reward_model")
    output_dir: Text = option("runs/reward_model")
    batch_size: int = option(64, ge=1, help=
        "Preference pairs per step, over all processes.")
    learning_rate: float = option(1e-05, gt=0)
    warmup_steps: float = option(0.1, ge=0)
    long_examples: Literal["error", "drop"] = option("error", help=
        "Refuse data with texts beyond max_length, or drop these pairs.")
    center_rewards_coefficient: float | None = option(None, gt=0, help=
        "Coefficient of the mean of (r_chosen + r_rejected)^2, which holds rewards around 0; "
        "0.01 is usual. None leaves it out.")
    # fmt: on
