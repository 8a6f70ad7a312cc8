"""What every run has, whatever the algorithm: model, data, optimizer, checkpoints, trackers."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.fields import Checked, choice, number

# Those of transformers that need no arguments beyond the number of steps.
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)


@dataclass(kw_only=True)
class RunConfig(Checked):
    """One step is one rollout batch and every update on it."""

    algorithm: str = "policy gradient"
    """Which algorithm a recipe file is for."""

    model_name_or_path: str | None = None
    """Path or Hub id of the model to train; without one, the task's own tiny model."""
    trust_remote_code: bool = False
    """Run code that comes with a model, tokenizer or reward model; otherwise one that needs it is
    refused."""
    task: Literal["arithmetic", "preference", "guess", "calculator"] = "arithmetic"
    """The embedded task that a recipe trains on: prompts and reward, environment or tools."""
    reward_model_name_or_path: str | None = None
    """A sequence-classification model, path or Hub id, that a recipe trains on; the task's own
    reward comes second: with reward_weights 1 and 0 it is tracked and has no effect."""
    output_dir: str = "runs/policy_gradient"
    """Directory of everything that the run leaves behind."""
    resume_from_checkpoint: str | None = None
    """A checkpoint directory, or "latest" for the newest one in output_dir."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of prompt order, sampling noise and minibatch order."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the weights and of the computation; log-probabilities are in float32 at least."""
    bfloat16_update: Literal["master_weights", "stochastic_rounding", "nearest"] = "master_weights"
    """How an update reaches weights in bfloat16, which have 8 bits: through float32 copies, which
    stay in memory; rounded up or down at random, so that the mean is exact; or rounded to the
    nearest, which loses most updates. Adapters are in float32.
    """
    disable_dropout: bool = True
    """Update in evaluation mode, without dropout, jitter of routers or what else train mode has, so
    that scoring and training see one policy; False: in train mode, with the model's own rates."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""

    use_peft: bool = False
    """Train a LoRA adapter on frozen weights; `final/` then holds the adapter."""
    lora_r: int = number(16, minimum=1)
    """Rank of the adapter."""
    lora_alpha: float = number(32.0, above=0)
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_dropout: float = number(0.0, minimum=0, below=1)
    """Dropout in front of the adapter; needs disable_dropout: false."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the modules that get an adapter; None: every linear layer but the head."""
    load_in_4bit: bool = False
    """QLoRA: load the frozen weights in 4 bits (NF4); needs bitsandbytes and an adapter."""
    save_merged: bool = False
    """Leave the model with its adapter merged in, too, in `final/merged/`."""

    pad_token: str | None = None
    """Used where the tokenizer has no pad token; the EOS token will do."""
    shuffle_dataset: bool = True
    """Draw prompts in an order permuted anew each epoch; otherwise as the dataset has them."""
    max_prompt_length: int | None = number(None, minimum=1)
    """Longest prompt in tokens; None allows whatever the model's positions leave."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with prompts beyond max_prompt_length: refuse the dataset, or drop and count."""

    prompts_per_step: int = number(16, minimum=1)
    """Prompts drawn per step, over all processes."""
    num_generations: int = number(8, minimum=1)
    """Completions per prompt: the group."""
    num_iterations: int = number(1, minimum=1)
    """Passes over each rollout batch (PPO epochs)."""
    num_mini_batches: int = number(1, minimum=1)
    """Optimizer updates per pass; each minibatch is whole groups."""
    micro_batch_tokens: int | Literal["auto"] = number("auto", minimum=1)
    """Tokens that one process forwards at a time; it never changes the result. auto: what a
    GPU's free memory holds, or a quarter of a CPU's, up to where more is not faster; a resumed run
    goes on with the number that was found."""

    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = "adamw_torch_fused"
    """AdamW of torch, in one kernel or in several, or with moments in 8 bits (bitsandbytes)."""
    learning_rate: float = number(1e-6, above=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = choice("linear", SCHEDULES)
    """linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup or
    inverse_sqrt; it advances once per step. The first four are stretched over the run, so that
    max_steps says what each step's rate is; the others give the first steps of a longer run."""
    warmup_steps: int = number(0, minimum=0)
    """Steps of linear warm-up."""
    weight_decay: float = number(0.0, minimum=0)
    """Of AdamW."""
    adam_beta1: float = number(0.9, minimum=0, below=1)
    """Of AdamW."""
    adam_beta2: float = number(0.999, minimum=0, below=1)
    """Of AdamW."""
    adam_epsilon: float = number(1e-8, above=0)
    """Of AdamW, as torch places it: outside the square root."""
    max_grad_norm: float = number(1.0, minimum=0)
    """Clip the gradient to this global norm; 0 does not clip."""
    max_skipped_steps: int = number(3, minimum=0)
    """An update whose loss or gradient is not finite is skipped, in all processes, and its batch
    kept in skipped/ in output_dir; one step more in a row than this without any update ends the
    run."""
    max_steps: int = number(-1, minimum=-1)
    """Steps to train; -1 goes by num_train_epochs. See lr_scheduler_type."""
    num_train_epochs: float = number(1.0, above=0)
    """Passes over the prompts, if max_steps is -1."""

    ddp_timeout: int = number(1800, above=0)
    """Seconds that a process waits for another; then all of them report where they are, and end.

    One process may generate, reward or save for this much longer than the others, and no more.
    """

    save_steps: int = number(100, minimum=0)
    """Save a checkpoint every so many steps; 0 saves only when the run is cut short."""
    save_total_limit: int | None = number(2, minimum=1)
    """Keep so many checkpoints, the newest; None keeps all. `best/` is none of them."""
    eval_steps: int = number(0, minimum=0)
    """Evaluate every so many steps, sampled and greedy; 0 never does."""
    num_generations_eval: int = number(1, minimum=1)
    """Sampled completions per prompt in evaluation; with several there is eval_pass@k and
    eval_majority@n."""
    eval_success_threshold: float = number(1.0)
    """A completion is right, for eval_pass@k, if its reward is at least this: the weighted sum of
    the reward functions, as they gave it."""
    save_best: bool = True
    """Keep the checkpoint with the highest eval_reward so far, in `best/`."""
    log_completions_steps: int = number(10, minimum=0)
    """Show and keep samples every so many steps; 0 never does."""
    num_completions_to_print: int = number(2, minimum=1)
    """How many samples that is."""
    logging_steps: int = number(1, minimum=1)
    """Trackers get the line of every so many steps, of each evaluation and of the last step;
    metrics.jsonl has them all."""
    report_to: tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get lines of metrics.jsonl as well; "none", like no name at all, is none.

    TensorBoard writes to tensorboard/ in output_dir and W&B to wandb/; trackio keeps its own
    database (TRACKIO_DIR). The project is rlhf_pg, or for W&B what WANDB_PROJECT says.
    """
    run_name: str | None = None
    """What W&B and trackio call the run; None leaves it to them."""

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):  # as users of transformers write it
            self.report_to = (self.report_to,)
        super().__post_init__()
        self.report_to = tuple(dict.fromkeys(name for name in self.report_to if name != "none"))
        if self.max_steps == 0:
            raise ValueError("max_steps must be at least 1, or -1 to go by num_train_epochs, got 0")
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches must be at most prompts_per_step ({self.prompts_per_step}), "
                f"since a minibatch is whole groups, got {self.num_mini_batches}"
            )
        self.refuse_idle(
            ("eval_success_threshold",),
            self.num_generations_eval > 1,
            "is for eval_pass@k: set num_generations_eval above 1, or leave it out",
        )
        lora = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
        self.refuse_idle(lora, self.use_peft, "is for LoRA: set use_peft to true, or leave it out")
        self.refuse_idle(
            ("bfloat16_update",),
            self.dtype == "bfloat16",
            "is for weights in bfloat16: set dtype to bfloat16, or leave it out",
        )
        if self.optim == "adamw_8bit" and self.dtype == "float64":
            raise ValueError("optim adamw_8bit updates no float64 weights: change dtype or optim")
        if self.lora_dropout and self.disable_dropout:
            raise ValueError("lora_dropout needs disable_dropout: false, which sets it to 0")

    def refuse_idle(self, keys: tuple[str, ...], used: bool, why: str) -> None:
        """Refuse a key that was set but would be ignored.

        Raises:
            ValueError: `used` is False and one of the keys is not at its default; it is named,
                followed by `why`.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for key in keys:
            if not used and key in defaults and getattr(self, key) != defaults[key]:
                raise ValueError(f"{key} {why}")

    def total_steps(self, num_prompts: int) -> int:
        """Steps of the run on a dataset of `num_prompts`."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * num_prompts / self.prompts_per_step)

    @property
    def token_budget(self) -> int:
        """`micro_batch_tokens`, once there is a number: a trainer's config has one."""
        if isinstance(self.micro_batch_tokens, str):
            raise ValueError("micro_batch_tokens is auto, for a trainer to find: give a number")
        return self.micro_batch_tokens

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.num_mini_batches
