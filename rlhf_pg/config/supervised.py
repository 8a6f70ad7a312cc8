"""Configs of the runs that prepare for RL: supervised fine-tuning and the reward model."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.data import DataConfig
from rlhf_pg.config.fields import choice, number
from rlhf_pg.config.run import SCHEDULES
from rlhf_pg.config.shared import AdapterConfig, ModelConfig


@dataclass(kw_only=True)
class SupervisedConfig(AdapterConfig, DataConfig, ModelConfig):
    """Keys of every supervised run: text, batches, optimizer, checkpoints, trackers."""

    output_dir: str = "runs/supervised"
    """Directory for everything that the run writes: the model is in `final/`, its metrics on
    held-out data in `metrics.json`."""
    resume_from_checkpoint: str | None = None
    """Checkpoint directory to resume from, or "latest" for the newest one in output_dir."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the order of examples, and of weights that are new."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation. With bfloat16, trained weights stay in float32, and the frozen
    ones under an adapter are in bfloat16."""
    disable_dropout: bool = True
    """Train without dropout. False keeps the model's own rates."""

    pad_token: str | None = None
    """Pad token for a tokenizer that has none; the EOS token will do."""
    max_length: int | None = number(None, minimum=1)
    """Longest text in tokens; None allows as many as the model has positions."""
    append_eos: bool = True
    """Append the EOS to texts that are strings, as a policy ends them; a chat ends as its template
    says."""

    num_train_epochs: float = number(1.0, above=0)
    """Passes over the data, if max_steps is -1."""
    max_steps: int = number(-1, minimum=-1)
    """Number of optimizer steps; -1 goes by num_train_epochs."""
    batch_size: int = number(32, minimum=1)
    """Examples (of a reward model: pairs) per step, over all processes."""
    micro_batch_size: int | Literal["auto"] = number("auto", minimum=1)
    """Examples that one process forwards at a time; lower it if memory runs out. It never changes
    the result. auto takes as many as keep the padded batch within 16384 tokens, and its logits in
    float32 within 1 GiB."""
    learning_rate: float = number(2e-5, above=0)
    """Peak learning rate of AdamW; an adapter takes about ten times that of a whole model."""
    lr_scheduler_type: str = choice("cosine", SCHEDULES)
    """Schedule of the learning rate behind its warm-up."""
    warmup_steps: float = number(0.0, minimum=0)
    """Steps over which the learning rate rises linearly to its peak; below 1, a share of all."""
    weight_decay: float = number(0.0, minimum=0)
    """Weight decay of AdamW; biases and norms do not decay."""
    max_grad_norm: float = number(1.0, minimum=0)
    """Global norm to which the gradient is clipped; 0 does not clip."""

    eval_steps: int = number(0, minimum=0)
    """Steps between two evaluations on held-out data; 0 evaluates at the end only."""
    save_steps: int = number(500, minimum=0)
    """Steps between two checkpoints, checkpoint-N in output_dir; 0 saves none."""
    save_total_limit: int | None = number(2, minimum=1)
    """Number of checkpoints to keep, the newest; None keeps all."""
    logging_steps: int = number(10, minimum=1)
    """Steps between two lines of metrics.jsonl and of trackers."""
    report_to: tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the lines of metrics.jsonl as well, by the callbacks of transformers."""
    run_name: str | None = None
    """Name of the run in W&B and trackio; None leaves it to them."""

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):  # as users of transformers write it
            self.report_to = (self.report_to,)
        super().__post_init__()
        self.report_to = tuple(dict.fromkeys(name for name in self.report_to if name != "none"))
        if self.max_steps == 0:
            raise ValueError("max_steps must be at least 1, or -1 to go by num_train_epochs, got 0")
        if self.lora_dropout and self.disable_dropout:
            raise ValueError("lora_dropout needs disable_dropout: false, which keeps it")


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Config of supervised fine-tuning (`recipes/sft.py`)."""

    algorithm: Literal["sft"] = "sft"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/sft"
    """Directory for everything that the run writes: the model is in `final/`, its metrics on
    held-out data in `metrics.json`."""
    completion_only_loss: bool | None = None
    """Learn only the completion of a prompt. None is true where there is a prompt; false learns the
    prompt too."""
    assistant_only_loss: bool = False
    """Learn only the assistant's turns of a chat, as the template's generation tags mark them, or
    else as rendering the chat turn by turn tells them apart."""
    long_examples: Literal["error", "drop", "truncate"] = "error"
    """Refuse data with examples beyond max_length, drop these examples, or cut off their ends."""
    packing: bool = False
    """Lay the examples of a micro-batch one behind another in one row without padding, each with
    positions of its own. Refused where the model's attention mixes them."""
    label_smoothing: float = number(0.0, minimum=0, below=1)
    """Probability spread over the vocabulary, so that the model leaves RL answers to explore."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assistant_only_loss and self.completion_only_loss is False:
            raise ValueError(
                "assistant_only_loss learns no prompt, and completion_only_loss: false learns it: "
                "leave one of them out"
            )


@dataclass(kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Config of a reward model trained on preference pairs (`recipes/reward_model.py`)."""

    algorithm: Literal["reward_model"] = "reward_model"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/reward_model"
    """Directory for everything that the run writes: the model is in `final/`, its metrics on
    held-out data in `metrics.json`."""
    batch_size: int = number(64, minimum=1)
    """Preference pairs per step, over all processes."""
    learning_rate: float = number(1e-5, above=0)
    """Peak learning rate of AdamW; an adapter takes about ten times that of a whole model."""
    warmup_steps: float = number(0.1, minimum=0)
    """Steps over which the learning rate rises linearly to its peak; below 1, a share of all."""
    long_examples: Literal["error", "drop"] = "error"
    """Refuse data with texts beyond max_length, or drop these pairs."""
    center_rewards_coefficient: float | None = number(None, above=0)
    """Coefficient of the mean of (r_chosen + r_rejected)^2, which holds rewards around 0; 0.01 is
    usual. None leaves it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_in_4bit:
            raise ValueError(
                "load_in_4bit is not for a reward model, whose adapter is merged into its weights "
                "on saving: leave it out, and use_peft trains an adapter on whole weights"
            )
        if self.save_merged:
            raise ValueError("save_merged is not needed: a reward model is always saved merged")
