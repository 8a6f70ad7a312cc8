"""Keys of every training, and of a run with rewards: batches, optimizer, checkpoints, trackers."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from rlhf_pg.config.fields import (
    Auto,
    Names,
    Text,
    as_list,
    config,
    option,
)
from rlhf_pg.config.foreign_keys import configs

# Schedules of transformers that need no argument except the number of steps.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
Optim = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"]
TrackerNames = Annotated[
    tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...],
    BeforeValidator(lambda value: as_list(value) or ()),
    AfterValidator(lambda names: tuple(dict.fromkeys(x for x in names if x != "none"))),
]


# fmt: off
@config
class TrainingConfig:
    """Keys of every training: output, length, optimizer, trackers."""

    algorithm: Text = option("policy gradient", "run", help="Algorithm of the recipe.")
    output_dir: Text = option("runs/policy_gradient", "output", help=
        "Directory for the run's files.")
    resume_from_checkpoint: Text | None = option(None, "output", help=
        'Checkpoint directory to resume from, or "latest" for the newest in output_dir.')
    seed: int = option(42, "run", ge=0, le=2 ** 32 - 1, help="Seed of all random numbers.")
    deterministic: bool = option(False, "cost", help=
        "The same bits in every run on the same GPUs, by torch's deterministic kernels, which are "
        "slower. A CPU's sums are the same anyway.")
    disable_dropout: bool = option(True, "update", help="Train without dropout or router jitter.")
    pad_token: Text | None = option(None, "run", help="Pad token for a tokenizer without one.")
    eos_token: Text | None = option(None, "run", help=
        "Token that ends a completion, such as <|im_end|>, where the tokenizer names another.")
    num_train_epochs: float = option(1.0, "later", gt=0, help=
        "Passes over the data, if max_steps is -1.")
    max_steps: int = option(-1, "later", ge=-1, help="Number of steps; -1: by num_train_epochs.")
    micro_batch_tokens: Auto = option("auto", "cost", help=
        "Most tokens per forward pass; never changes the result. auto: as many as fit.")
    learning_rate: float = option(1e-06, "later", gt=0, help="Peak learning rate.")
    lr_scheduler_type: Text = option("linear", "update", names=SCHEDULES, help=
        "Schedule of the learning rate; the first four span the whole run.")
    optim: Optim = option("adamw_torch_fused", "update", help=
        "AdamW in one kernel (fused), in several, or with 8-bit moments (bitsandbytes).")
    adam_beta1: float = option(0.9, "update", ge=0, lt=1, help=
        "Decay rate of AdamW's first moment.")
    adam_beta2: float = option(0.999, "update", ge=0, lt=1, help=
        "Decay rate of AdamW's second moment.")
    adam_epsilon: float = option(1e-08, "update", gt=0, help=
        "Epsilon of AdamW, outside the square root.")
    weight_decay: float = option(0.0, "update", ge=0, help=
        "Weight decay of AdamW, except biases and norms.")
    max_grad_norm: float = option(1.0, "update", ge=0, help=
        "Clip the gradient to this norm; 0: no clipping.")
    max_skipped_steps: int = option(3, "cost", ge=0, help=
        "Most consecutive steps skipped for non-finite gradients; one more ends the run.")
    ddp_timeout: int = option(1800, "output", gt=0, help=
        "Seconds that a process waits for the slowest one.")
    eval_steps: int = option(0, "evaluation", ge=0, help="Steps between evaluations; 0: none.")
    save_steps: int = option(100, "output", ge=0, help=
        "Steps between checkpoints, the last step included; 0: only if interrupted.")
    save_total_limit: int | None = option(2, "output", ge=1, help=
        "Newest checkpoints to keep. None: all.")
    report_to: TrackerNames = option((), "output", help=
        "Trackers; W&B and TensorBoard write into output_dir, trackio to TRACKIO_DIR.")
    run_name: Text | None = option(None, "output", help="Name of the run in W&B and trackio.")
    logging_steps: int = option(1, "output", ge=1, help="Steps between lines sent to trackers.")
    push_to_hub: bool = option(False, "output", help=
        "Upload final/ at the end, with HF_TOKEN or `hf auth login`. A failure is a warning.")
    hub_model_id: Text | None = option(None, "output", needs="push_to_hub", help=
        "Id of the model on the Hub, such as me/my-model. None: the name of output_dir.")
    hub_private_repo: bool | None = option(None, "output", needs="push_to_hub", help=
        "Make a new model on the Hub private. None: the account's default.")


@config
class RunConfig:
    """Keys of a run. One step is one rollout batch and every update on it."""

    trainer: Text | None = option(None, "inputs", help=
        "Trainer of your own, a class whose config may have more keys: my_trainer.py:CLASS.")
    given_in_python: Names = option((), "cost", help=
        "Arguments given in Python, required again to resume.")

    shuffle_dataset: bool = option(True, "run", help="Shuffle the prompts in each epoch.")
    max_prompt_length: int | None = option(None, "run", ge=1, help=
        "Longest prompt in tokens. None: as the model's positions allow.")
    long_prompts: Literal["error", "drop"] = option("error", "run", help=
        "Refuse prompts longer than max_prompt_length, or drop and count them.")

    prompts_per_step: int = option(16, "run", ge=1, help="Prompts per step, over all processes.")
    num_generations: int = option(8, "run", ge=1, help="Completions per prompt (its group).")
    num_iterations: int = option(1, "update", ge=1,
        bias="later updates have an older policy's prefixes", help=
        "Passes over each rollout batch (PPO epochs).")
    num_mini_batches: int = option(1, "update", ge=1, bias="num_iterations", help=
        "Updates per pass; each has whole groups.")
    warmup_steps: int = option(0, "update", ge=0, help=
        "Steps of linear warm-up to the peak learning rate.")
    num_generations_eval: int = option(1, "evaluation", ge=1, help=
        "Completions per prompt in evaluation; several give eval_pass@k and eval_majority@n.")
    eval_success_threshold: float = option(1.0, "evaluation", needs="num_generations_eval above 1",
        help=
        "Weighted sum of raw scores from which eval_pass@k counts a completion as correct.")
    save_best: bool = option(True, "output", help=
        "Keep the checkpoint of the highest eval_reward, in best/.")
    log_completions_steps: int = option(10, "output", ge=0, help=
        "Steps between saving (and printing some) completions, plus the first and last; 0: none.")
    num_completions_to_print: int = option(2, "output", ge=1, help=
        "Prompts with a printed completion.")


def effect_of(key: str) -> str:
    """Return the name in `EFFECTS` of a key of any config, "update" by default."""
    for kind in configs(TrainingConfig):
        if key in kind.__dataclass_fields__:
            return str(kind.__dataclass_fields__[key].metadata.get("effect", "update"))
    return "update"
