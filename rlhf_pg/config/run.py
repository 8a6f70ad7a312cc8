"""Keys of every run, whatever the algorithm: model, data, optimizer, checkpoints, trackers."""

import math
from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.data import DataConfig
from rlhf_pg.config.fields import choice, number
from rlhf_pg.config.rewards import RewardsConfig
from rlhf_pg.config.shared import AdapterConfig, ModelConfig

# Schedules of transformers that need no argument but the number of steps.
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)


@dataclass(kw_only=True)
class RunConfig(AdapterConfig, RewardsConfig, DataConfig, ModelConfig):
    """Config of a run. One step is one rollout batch and every update on it."""

    algorithm: str = "policy gradient"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""

    output_dir: str = "runs/policy_gradient"
    """Directory for everything that the run writes."""
    resume_from_checkpoint: str | None = None
    """Checkpoint directory to resume from, or "latest" for the newest one in output_dir."""
    given_in_python: tuple[str, ...] = ()
    """Arguments that the trainer was given in Python, as config.yaml records them; a run from that
    file needs them again."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of prompt order, sampling noise and minibatch order."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the weights and the computation; log-probabilities are in float32 at least.
    Weights in bfloat16, whose 8 bits lose small changes, are updated through float32 copies."""
    disable_dropout: bool = True
    """Update in evaluation mode, without dropout or router jitter, so that scoring and training see
    one policy. False updates in train mode, with the model's own rates."""

    pad_token: str | None = None
    """Pad token for a tokenizer that has none; the EOS token will do."""
    shuffle_dataset: bool = True
    """Draw prompts in a new random order each epoch; otherwise in the order of the dataset."""
    max_prompt_length: int | None = number(None, minimum=1)
    """Longest prompt in tokens; None allows what the model's positions leave."""
    long_prompts: Literal["error", "drop"] = "error"
    """Refuse a dataset with prompts beyond max_prompt_length, or drop and count these prompts."""

    prompts_per_step: int = number(16, minimum=1)
    """Prompts per step, over all processes; more make the gradient less noisy and the step
    longer."""
    num_generations: int = number(8, minimum=1)
    """Completions per prompt (its group); more make a better baseline and cost more time."""
    num_iterations: int = number(1, minimum=1)
    """Passes over each rollout batch (PPO epochs); more move the policy further in a step."""
    num_mini_batches: int = number(1, minimum=1)
    """Optimizer updates per pass over the rollout batch; each minibatch holds whole groups."""
    micro_batch_tokens: int | Literal["auto"] = number("auto", minimum=1)
    """Most tokens that one process forwards at a time; lower it if memory runs out. It never
    changes the result. auto finds what a GPU's free memory holds, or a quarter of a CPU's, as far
    as more is faster; a resumed run keeps the number that was found."""
    optim: Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"] = "adamw_torch_fused"
    """AdamW implementation: torch's in one kernel or in several, or with moments in 8 bits
    (bitsandbytes)."""
    learning_rate: float = number(1e-6, above=0)
    """Peak learning rate; lower it if runs diverge."""
    lr_scheduler_type: str = choice("linear", SCHEDULES)
    """Learning-rate schedule, which advances once per step. linear, cosine, cosine_with_restarts
    and polynomial stretch over the whole run, so max_steps changes every rate; constant,
    constant_with_warmup and inverse_sqrt do not depend on its length."""
    warmup_steps: int = number(0, minimum=0)
    """Steps over which the learning rate rises linearly to its peak."""
    weight_decay: float = number(0.0, minimum=0)
    """Weight decay of AdamW; biases and norms do not decay."""
    adam_beta1: float = number(0.9, minimum=0, below=1)
    """Decay rate of AdamW's first moment."""
    adam_beta2: float = number(0.999, minimum=0, below=1)
    """Decay rate of AdamW's second moment."""
    adam_epsilon: float = number(1e-8, above=0)
    """Epsilon of AdamW, added outside the square root as in torch."""
    max_grad_norm: float = number(1.0, minimum=0)
    """Global norm to which the gradient is clipped; 0 does not clip."""
    max_skipped_steps: int = number(3, minimum=0)
    """Steps in a row that may pass without any update; one more ends the run. An update whose loss
    or gradient is not finite is skipped in all processes, and its batch is kept in skipped/ in
    output_dir."""
    max_steps: int = number(-1, minimum=-1)
    """Number of steps to train; -1 goes by num_train_epochs. It may change the learning rate: see
    lr_scheduler_type."""
    num_train_epochs: float = number(1.0, above=0)
    """Passes over the prompts, if max_steps is -1."""

    ddp_timeout: int = number(1800, above=0)
    """Seconds that a process waits for the others before all of them report where they are and end.
    Raise it if one process generates, rewards or saves for longer than that."""

    save_steps: int = number(100, minimum=0)
    """Steps between two checkpoints; 0 saves one only if the run is cut short."""
    save_total_limit: int | None = number(2, minimum=1)
    """Number of checkpoints to keep, the newest, not counting `best/`; None keeps all."""
    eval_steps: int = number(0, minimum=0)
    """Steps between two evaluations, which are sampled and greedy; 0 never evaluates."""
    num_generations_eval: int = number(1, minimum=1)
    """Completions sampled per prompt in evaluation; several give eval_pass@k and
    eval_majority@n."""
    eval_success_threshold: float = number(1.0)
    """Lowest reward at which eval_pass@k counts a completion as right: the weighted sum of the
    reward functions' raw scores."""
    save_best: bool = True
    """Keep the checkpoint with the highest eval_reward so far, in `best/`."""
    log_completions_steps: int = number(10, minimum=0)
    """Steps between two whose completions are saved for readers, with the numbers of their tokens,
    and some shown; 0 saves none. Any step can be replayed in any case (rlhf-pg replay)."""
    num_completions_to_print: int = number(2, minimum=1)
    """Number of prompts of which a completion is shown each time."""
    logging_steps: int = number(1, minimum=1)
    """Steps between two lines sent to trackers, which also get evaluations and the last step;
    metrics.jsonl has every step."""
    report_to: tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get lines of metrics.jsonl as well: TensorBoard writes to tensorboard/ in
    output_dir, W&B to wandb/, trackio to its own database (TRACKIO_DIR); "none" is no tracker. The
    project is rlhf_pg, or for W&B what WANDB_PROJECT says."""
    run_name: str | None = None
    """Name of the run in W&B and trackio; None leaves it to them."""
    push_to_hub: bool = False
    """Upload `final/` to the Hub once it is whole. The token is read from HF_TOKEN or from what
    `hf auth login` has kept; a failure is a warning, and `final/` stays."""
    hub_model_id: str | None = None
    """Id of the model on the Hub, such as me/my-model; None takes the name of output_dir."""
    hub_private_repo: bool | None = None
    """Make the model on the Hub private, if it is new; None leaves it to the account's default."""

    def __post_init__(self) -> None:
        self._accept_habits()
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
        if self.optim == "adamw_8bit" and self.dtype == "float64":
            raise ValueError("optim adamw_8bit updates no float64 weights: change dtype or optim")
        self.refuse_idle(
            ("hub_model_id", "hub_private_repo"),
            self.push_to_hub,
            "is for push_to_hub: set that to true, or leave it out",
        )
        if self.lora_dropout and self.disable_dropout:
            raise ValueError("lora_dropout needs disable_dropout: false, which sets it to 0")

    def _accept_habits(self) -> None:
        """Take values as users of transformers write them, or say what to write here."""
        if self.report_to is None:
            self.report_to = ()
        if isinstance(self.report_to, str):
            self.report_to = (self.report_to,)
        if "all" in self.report_to:
            raise ValueError("report_to all depends on what is installed: name the trackers")
        for key in ("logging_steps", "save_steps", "eval_steps", "warmup_steps"):
            value = getattr(self, key)
            if isinstance(value, float) and value.is_integer():
                setattr(self, key, int(value))
            elif isinstance(value, float):
                raise ValueError(
                    f"{key} must be a number of steps, got {value}: a share of the run, as "
                    "transformers takes it, depends on its length; write max_steps times the share"
                )

    def total_steps(self, num_prompts: int) -> int:
        """Return the number of steps of the run on a dataset of `num_prompts`."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * num_prompts / self.prompts_per_step)

    @property
    def token_budget(self) -> int:
        """The number in `micro_batch_tokens`; an error for auto, for which a trainer finds one."""
        if isinstance(self.micro_batch_tokens, str):
            raise ValueError("micro_batch_tokens is auto, for a trainer to find: give a number")
        return self.micro_batch_tokens

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.num_mini_batches
