"""Keys of every run with rewards: batches, optimizer, checkpoints, trackers."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from rlhf_pg.config.fields import Auto, Names, Text, config, listed, option

# Schedules of transformers that need no argument but the number of steps.
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)
Optim = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"]
Trackers = Annotated[
    tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...],
    BeforeValidator(lambda value: listed(value) or ()),
]


@config
class RunConfig:
    """Keys of a run. One step is one rollout batch and every update on it."""

    # fmt: off
    algorithm: Text = option("policy gradient", help=
        "Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it.")

    output_dir: Text = option("runs/policy_gradient", help=
        "Directory for everything that the run writes.")
    resume_from_checkpoint: Text | None = option(None, help=
        'Checkpoint directory to resume from, or "latest" for the newest one in output_dir.')
    given_in_python: Names = option((), help=
        "Arguments that the trainer was given in Python, as config.yaml records them; a run "
        "from that file needs them again.")
    seed: int = option(42, ge=0, le=2 ** 32 - 1, help=
        "Seed of prompt order, sampling noise and minibatch order.")
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", help=
        "Data type of the weights and the computation; log-probabilities are in float32 at "
        "least. Weights in bfloat16, whose 8 bits lose small changes, are updated through "
        "float32 copies.")
    disable_dropout: bool = option(True, help=
        "Update in evaluation mode, without dropout or router jitter, so that scoring and "
        "training see one policy. False updates in train mode, with the model's own rates.")

    pad_token: Text | None = option(None, help=
        "Pad token for a tokenizer that has none; the EOS token will do.")
    shuffle_dataset: bool = option(True, help=
        "Draw prompts in a new random order each epoch; otherwise in the order of the dataset.")
    max_prompt_length: int | None = option(None, ge=1, help=
        "Longest prompt in tokens; None allows what the model's positions leave.")
    long_prompts: Literal["error", "drop"] = option("error", help=
        "Refuse a dataset with prompts beyond max_prompt_length, or drop and count these "
        "prompts.")

    prompts_per_step: int = option(16, ge=1, help=
        "Prompts per step, over all processes; more make the gradient less noisy and the step "
        "longer.")
    num_generations: int = option(8, ge=1, help=
        "Completions per prompt (its group); more make a better baseline and cost more time.")
    num_iterations: int = option(1, ge=1, help=
        "Passes over each rollout batch (PPO epochs); more move the policy further in a step.")
    num_mini_batches: int = option(1, ge=1, help=
        "Optimizer updates per pass over the rollout batch; each minibatch holds whole groups.")
    micro_batch_tokens: Auto = option("auto", help=
        "Most tokens that one process forwards at a time; lower it if memory runs out. It never "
        "changes the result. auto finds what a GPU's free memory holds, or a quarter of a "
        "CPU's, as far as more is faster; a resumed run keeps the number that was found.")
    optim: Optim = option("adamw_torch_fused", help=
        "AdamW implementation: torch's in one kernel or in several, or with moments in 8 bits "
        "(bitsandbytes).")
    learning_rate: float = option(1e-06, gt=0, help=
        "Peak learning rate; lower it if runs diverge.")
    lr_scheduler_type: Text = option("linear", names=SCHEDULES, help=
        "Learning-rate schedule, which advances once per step. linear, cosine, "
        "cosine_with_restarts and polynomial stretch over the whole run, so max_steps changes "
        "every rate; constant, constant_with_warmup and inverse_sqrt do not depend on its "
        "length.")
    warmup_steps: int = option(0, ge=0, help=
        "Steps over which the learning rate rises linearly to its peak.")
    weight_decay: float = option(0.0, ge=0, help=
        "Weight decay of AdamW; biases and norms do not decay.")
    adam_beta1: float = option(0.9, ge=0, lt=1, help=
        "Decay rate of AdamW's first moment.")
    adam_beta2: float = option(0.999, ge=0, lt=1, help=
        "Decay rate of AdamW's second moment.")
    adam_epsilon: float = option(1e-08, gt=0, help=
        "Epsilon of AdamW, added outside the square root as in torch.")
    max_grad_norm: float = option(1.0, ge=0, help=
        "Global norm to which the gradient is clipped; 0 does not clip.")
    max_skipped_steps: int = option(3, ge=0, help=
        "Steps in a row that may pass without any update; one more ends the run. An update "
        "whose loss or gradient is not finite is skipped in all processes, and its batch is "
        "kept in skipped/ in output_dir.")
    max_steps: int = option(-1, ge=-1, help=
        "Number of steps to train; -1 goes by num_train_epochs. It may change the learning "
        "rate: see lr_scheduler_type.")
    num_train_epochs: float = option(1.0, gt=0, help=
        "Passes over the prompts, if max_steps is -1.")

    ddp_timeout: int = option(1800, gt=0, help=
        "Seconds that a process waits for the others before all of them report where they are "
        "and end. Raise it if one process generates, rewards or saves for longer than that.")

    save_steps: int = option(100, ge=0, help=
        "Steps between two checkpoints; 0 saves one only if the run is cut short.")
    save_total_limit: int | None = option(2, ge=1, help=
        "Number of checkpoints to keep, the newest, not counting `best/`; None keeps all.")
    eval_steps: int = option(0, ge=0, help=
        "Steps between two evaluations, which are sampled and greedy; 0 never evaluates.")
    num_generations_eval: int = option(1, ge=1, help=
        "Completions sampled per prompt in evaluation; several give eval_pass@k and "
        "eval_majority@n.")
    eval_success_threshold: float = option(1.0, help=
        "Lowest reward at which eval_pass@k counts a completion as right: the weighted sum of "
        "the reward functions' raw scores.")
    save_best: bool = option(True, help=
        "Keep the checkpoint with the highest eval_reward so far, in `best/`.")
    log_completions_steps: int = option(10, ge=0, help=
        "Steps between two whose completions are saved for readers, with the numbers of their "
        "tokens, and some shown; 0 saves none. Any step can be replayed in any case (rlhf-pg "
        "replay).")
    num_completions_to_print: int = option(2, ge=1, help=
        "Number of prompts of which a completion is shown each time.")
    logging_steps: int = option(1, ge=1, help=
        "Steps between two lines sent to trackers, which also get evaluations and the last "
        "step; metrics.jsonl has every step.")
    report_to: Trackers = option((), help=
        "Trackers that get lines of metrics.jsonl as well: TensorBoard writes to tensorboard/ "
        'in output_dir, W&B to wandb/, trackio to its own database (TRACKIO_DIR); "none" is no '
        "tracker. The project is rlhf_pg, or for W&B what WANDB_PROJECT says.")
    run_name: Text | None = option(None, help=
        "Name of the run in W&B and trackio; None leaves it to them.")
    push_to_hub: bool = option(False, help=
        "Upload `final/` to the Hub once it is whole. The token is read from HF_TOKEN or from "
        "what `hf auth login` has kept; a failure is a warning, and `final/` stays.")
    hub_model_id: Text | None = option(None, help=
        "Id of the model on the Hub, such as me/my-model; None takes the name of output_dir.")
    hub_private_repo: bool | None = option(None, help=
        "Make the model on the Hub private, if it is new; None leaves it to the account's "
        "default.")
    # fmt: on
