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
class TrainingConfig:
    """Keys of every training: where it writes, its length, its optimizer, its trackers."""

    # fmt: off
    algorithm: Text = option("policy gradient", help="Algorithm of the recipe.")
    output_dir: Text = option("runs/policy_gradient", help="Directory for all that the run writes.")
    resume_from_checkpoint: Text | None = option(None, help=
        'Checkpoint directory to resume from, or "latest" for the newest one in output_dir.')
    seed: int = option(42, ge=0, le=2 ** 32 - 1, help="Seed of all that is drawn at random.")
    disable_dropout: bool = option(True, help=
        "Train without dropout or router jitter. False keeps the model's own rates.")
    pad_token: Text | None = option(None, help=
        "Pad token for a tokenizer that has none; the EOS token will do.")
    num_train_epochs: float = option(1.0, gt=0, help="Passes over the data, if max_steps is -1.")
    max_steps: int = option(-1, ge=-1, help="Number of steps; -1 goes by num_train_epochs.")
    weight_decay: float = option(0.0, ge=0, help=
        "Weight decay of AdamW; biases and norms do not decay.")
    max_grad_norm: float = option(1.0, ge=0, help=
        "Global norm to which the gradient is clipped; 0 does not clip.")
    save_total_limit: int | None = option(2, ge=1, help=
        "Number of checkpoints to keep, the newest; None keeps all.")
    report_to: Trackers = option((), help=
        "Trackers that get the lines of metrics.jsonl. TensorBoard and W&B write into output_dir, "
        "trackio to TRACKIO_DIR; the project is rlhf_pg, or W&B's WANDB_PROJECT.")
    run_name: Text | None = option(None, help=
        "Name of the run in W&B and trackio; None leaves it to them.")
    # fmt: on


@config
class RunConfig:
    """Keys of a run. One step is one rollout batch and every update on it."""

    # fmt: off
    given_in_python: Names = option((), help=
        "Arguments that the trainer was given in Python, as config.yaml records them; a run from "
        "that file needs them again.")
    dtype: Literal["float32", "bfloat16", "float64"] = option("float32", help=
        "Data type of weights and computation; log-probabilities are in float32 at least. bfloat16 "
        "weights, which lose small changes, are updated through float32 copies.")

    shuffle_dataset: bool = option(True, help=
        "Draw prompts in a new random order each epoch, or in the dataset's order.")
    max_prompt_length: int | None = option(None, ge=1, help=
        "Longest prompt in tokens; None allows what the model's positions leave.")
    long_prompts: Literal["error", "drop"] = option("error", help=
        "Refuse prompts beyond max_prompt_length, or drop and count them.")

    prompts_per_step: int = option(16, ge=1, help="Prompts per step, over all processes.")
    num_generations: int = option(8, ge=1, help="Completions per prompt (its group).")
    num_iterations: int = option(1, ge=1, help="Passes over each rollout batch (PPO epochs).")
    num_mini_batches: int = option(1, ge=1, help=
        "Updates per pass over the rollout batch; a minibatch holds whole groups.")
    micro_batch_tokens: Auto = option("auto", help=
        "Most tokens that one process forwards at a time, which never changes the result. auto "
        "takes what fits; a resumed run keeps that number.")
    optim: Optim = option("adamw_torch_fused", help=
        "AdamW in one kernel (fused), in several, or with moments in 8 bits (bitsandbytes).")
    learning_rate: float = option(1e-06, gt=0, help="Peak learning rate.")
    lr_scheduler_type: Text = option("linear", names=SCHEDULES, help=
        "Schedule of the learning rate, which advances once per step. The first four stretch over "
        "the whole run, so that max_steps changes every rate; the others do not.")
    warmup_steps: int = option(0, ge=0, help=
        "Steps over which the learning rate rises linearly to its peak.")
    adam_beta1: float = option(0.9, ge=0, lt=1, help="Decay rate of AdamW's first moment.")
    adam_beta2: float = option(0.999, ge=0, lt=1, help="Decay rate of AdamW's second moment.")
    adam_epsilon: float = option(1e-08, gt=0, help=
        "Epsilon of AdamW, added outside the square root as in torch.")
    max_skipped_steps: int = option(3, ge=0, help=
        "Steps in a row that may pass without an update; one more ends the run. Updates that are "
        "not finite are skipped, and kept in skipped/ in output_dir.")

    ddp_timeout: int = option(1800, gt=0, help=
        "Seconds that a process waits for the others before all end and say where they are. Raise "
        "it if one generates, rewards or saves for longer.")

    save_steps: int = option(100, ge=0, help=
        "Steps between two checkpoints; 0 saves one only if the run is cut short.")
    eval_steps: int = option(0, ge=0, help=
        "Steps between two evaluations, which are sampled and greedy; 0 never evaluates.")
    num_generations_eval: int = option(1, ge=1, help=
        "Completions per prompt in evaluation; several give eval_pass@k and eval_majority@n.")
    eval_success_threshold: float = option(1.0, help=
        "Lowest weighted sum of raw scores at which eval_pass@k counts a completion as right.")
    save_best: bool = option(True, help=
        "Keep the checkpoint with the highest eval_reward, in best/.")
    log_completions_steps: int = option(10, ge=0, help=
        "Steps between two whose completions are saved and some of them shown; 0 saves none. Any "
        "step can be replayed anyway.")
    num_completions_to_print: int = option(2, ge=1, help=
        "Prompts of which a completion is shown each time.")
    logging_steps: int = option(1, ge=1, help=
        "Steps between two lines sent to trackers; metrics.jsonl has every step.")
    push_to_hub: bool = option(False, help=
        "Upload final/ to the Hub at the end, with the token of HF_TOKEN or `hf auth login`. A "
        "failure is a warning.")
    hub_model_id: Text | None = option(None, help=
        "Id of the model on the Hub, such as me/my-model; None takes the name of output_dir.")
    hub_private_repo: bool | None = option(None, help=
        "Make a new model on the Hub private; None leaves it to the account's default.")
    # fmt: on
