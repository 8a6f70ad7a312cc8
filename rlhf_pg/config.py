"""Every key of every algorithm: its default, its range beside it, and what it means.

Batch sizes are global: the number of processes is not a hyper-parameter. `rlhf_pg.recipe` reads a
config from YAML and flags.
"""

import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Literal

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.fields import Checked, choice, number
from rlhf_pg.losses import POLICY_LOSSES

# Those of transformers that need no arguments beyond the number of steps.
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)
NEED_CRITIC = {"gae"}
CRITIC_FREE = set(ADVANTAGES) - NEED_CRITIC
BASELINES = CRITIC_FREE - {"returns"}


@dataclass(kw_only=True)
class PolicyGradientConfig(Checked):
    """What all algorithms share. One step is one rollout batch and every update on it."""

    algorithm: str = "policy gradient"
    """Which algorithm a recipe file is for."""

    model_name_or_path: str | None = None
    """Path or Hub id of the model to train; without one, the task's own tiny model."""
    task: Literal["arithmetic", "preference"] = "arithmetic"
    """The embedded task that a recipe trains on: prompts and reward."""
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
    """Of the weights and of the computation; log-probabilities are in float32 at least.

    Weights in bfloat16 lose updates below their last bit, about 0.4 % of a weight.
    """
    disable_dropout: bool = True
    """Set every dropout of the model to 0, so that scoring and training see one policy."""
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
    micro_batch_tokens: int = number(16384, minimum=1)
    """Padded tokens that one process forwards at a time; it never changes the result."""

    rollout_engine: Literal["native"] = "native"
    """What samples: the policy itself, in this process."""
    max_completion_length: int = number(512, minimum=1)
    """Longest completion in tokens, EOS included."""
    temperature: float = number(1.0, above=0, because="training needs the sampled distribution")
    """Of the policy: it divides every logit, in sampling, scoring and training alike."""

    advantage_estimator: str = choice("group_normalized", ADVANTAGES)
    """A name in rlhf_pg.advantages.ADVANTAGES."""
    policy_loss: str = choice("clipped_surrogate", POLICY_LOSSES)
    """A name in rlhf_pg.losses.POLICY_LOSSES."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How tokens weigh in the loss: see rlhf_pg.losses.token_weights."""
    epsilon: float = number(0.2, above=0, below=1)
    """Clip distance of the ratio: below 1 by epsilon, above 1 by epsilon_high."""
    epsilon_high: float | None = number(None, above=0)
    """Upper clip distance; None means epsilon."""
    beta: float = number(0.0, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "loss"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """See rlhf_pg.kl.kl_estimate."""
    target_kl: float | None = number(None, above=0)
    """Stop a step's updates once the mean KL(old || new) of a minibatch is above 1.5 times this."""
    entropy_coef: float = number(0.0, minimum=0)
    """Coefficient of the entropy, which is maximised."""
    normalize_advantages: bool = False
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; None weighs each by 1."""
    missing_eos_penalty: float | None = number(None, minimum=0)
    """Subtracted from the score of every completion that was cut off by its length."""

    learning_rate: float = number(1e-6, above=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = choice("linear", SCHEDULES)
    """linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup or
    inverse_sqrt; it advances once per step."""
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
    max_steps: int = number(-1, minimum=-1)
    """Steps to train; -1 goes by num_train_epochs."""
    num_train_epochs: float = number(1.0, above=0)
    """Passes over the prompts, if max_steps is -1."""

    save_steps: int = number(0, minimum=0)
    """Save a checkpoint every so many steps; 0 saves none."""
    eval_steps: int = number(0, minimum=0)
    """Evaluate every so many steps, sampled and greedy; 0 never does."""
    save_best: bool = True
    """Keep the checkpoint with the highest eval_reward so far, in `best/`."""
    log_completions_steps: int = number(10, minimum=0)
    """Show and keep samples every so many steps; 0 never does."""
    num_completions_to_print: int = number(2, minimum=1)
    """How many samples that is."""
    report_to: tuple[Literal["none", "tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get every line of metrics.jsonl as well; "none", like no name at all, is none.

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
        if self.policy_loss == "vanilla" and self.updates_per_step > 1:
            raise ValueError(
                'policy_loss "vanilla" is right for one update per rollout: set num_iterations and '
                'num_mini_batches to 1, or policy_loss to "clipped_surrogate"'
            )
        if self.kl_placement == "loss" and self.kl_estimator == "k1" and self.beta > 0:
            raise ValueError(
                'kl_estimator "k1" in the loss has an expected gradient of 0: use "k2" or "k3", or '
                'kl_placement "reward"'
            )
        if self.target_kl is not None and self.updates_per_step == 1:
            raise ValueError(
                "target_kl stops the updates after the first of a step, and there is only one: "
                "raise num_iterations or num_mini_batches, or leave it out"
            )
        self._check_adapter()
        self._check_estimator()

    def _check_adapter(self) -> None:
        """Refuse options of LoRA that would be ignored."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
        for key in keys if not self.use_peft else ():
            if getattr(self, key) != defaults[key]:
                raise ValueError(f"{key} is for LoRA: set use_peft to true, or leave it out")
        if self.lora_dropout and self.disable_dropout:
            raise ValueError("lora_dropout needs disable_dropout: false, which sets it to 0")

    def _check_estimator(self) -> None:
        """Refuse an estimator with nothing to compare, and options that would be ignored."""
        if self.advantage_estimator in NEED_CRITIC and not isinstance(self, PPOConfig):
            raise ValueError(
                f"advantage_estimator {self.advantage_estimator!r} needs a critic: only PPO has one"
            )
        rows = self.num_generations
        if self.advantage_estimator in ("returns_minus_others", "returns_minus_mean"):
            rows *= self.prompts_per_step
        if rows < 2 and self.advantage_estimator in BASELINES:
            raise ValueError(
                f"advantage_estimator {self.advantage_estimator!r} compares completions: raise "
                "num_generations (or prompts_per_step, for one that compares over the batch)"
            )
        for choice_, functions, keys in (
            ("advantage_estimator", ADVANTAGES, ("gamma", "lam", "scale_rewards")),
            ("policy_loss", POLICY_LOSSES, ("epsilon", "epsilon_high")),
        ):
            name = getattr(self, choice_)
            takes = inspect.signature(functions[name]).parameters
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            for key in keys:
                if key in defaults and key not in takes and getattr(self, key) != defaults[key]:
                    raise ValueError(f"{key} is not used by {choice_} {name!r}: leave it out")

    def total_steps(self, num_prompts: int) -> int:
        """Steps of the run on a dataset of `num_prompts`."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * num_prompts / self.prompts_per_step)

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.num_mini_batches


@dataclass(kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """GRPO (DeepSeekMath): advantages normalised within the group, clipped surrogate."""

    algorithm: Literal["grpo"] = "grpo"
    """Which algorithm a recipe file is for."""
    output_dir: str = "runs/grpo"
    """Directory of everything that the run leaves behind."""
    num_generations: int = number(8, minimum=2, because="a group of one has no spread to compare")
    """Completions per prompt: the group."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What centred scores are divided by: their group's std, the batch's, or nothing."""


@dataclass(kw_only=True)
class RLOOConfig(PolicyGradientConfig):
    """RLOO: the mean of the other completions as the baseline, KL in the reward."""

    algorithm: Literal["rloo"] = "rloo"
    """Which algorithm a recipe file is for."""
    output_dir: str = "runs/rloo"
    """Directory of everything that the run leaves behind."""
    num_generations: int = number(4, minimum=2, because="leaving one out needs others to compare")
    """Completions per prompt: the group."""
    advantage_estimator: str = choice("leave_one_out", ADVANTAGES)
    """A name in rlhf_pg.advantages.ADVANTAGES."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "constant"
    """How tokens weigh in the loss: see rlhf_pg.losses.token_weights."""
    beta: float = number(0.05, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """See rlhf_pg.kl.kl_estimate."""


@dataclass(kw_only=True)
class ReinforceConfig(PolicyGradientConfig):
    """REINFORCE: reward-to-go minus a baseline, KL per token in the reward."""

    algorithm: Literal["reinforce"] = "reinforce"
    """Which algorithm a recipe file is for."""
    output_dir: str = "runs/reinforce"
    """Directory of everything that the run leaves behind."""
    num_generations: int = number(1, minimum=1)
    """Completions per prompt."""
    gamma: float = number(1.0, above=0, maximum=1)
    """Discount per token."""
    advantage_estimator: str = choice("returns_minus_others", ADVANTAGES)
    """returns (no baseline), returns_minus_others or returns_minus_mean (batch mean)."""
    policy_loss: str = choice("vanilla", POLICY_LOSSES)
    """A name in rlhf_pg.losses.POLICY_LOSSES."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "constant"
    """How tokens weigh in the loss: see rlhf_pg.losses.token_weights."""
    beta: float = number(0.05, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """See rlhf_pg.kl.kl_estimate."""


@dataclass(kw_only=True)
class PPOConfig(PolicyGradientConfig):
    """PPO: a critic and GAE, clipped surrogate, KL per token in the reward."""

    algorithm: Literal["ppo"] = "ppo"
    """Which algorithm a recipe file is for."""
    output_dir: str = "runs/ppo"
    """Directory of everything that the run leaves behind."""
    num_generations: int = number(1, minimum=1)
    """Completions per prompt."""
    num_iterations: int = number(4, minimum=1)
    """Passes over each rollout batch (PPO epochs)."""
    advantage_estimator: str = choice("gae", ADVANTAGES)
    """A name in rlhf_pg.advantages.ADVANTAGES that makes use of the critic."""
    gamma: float = number(1.0, above=0, maximum=1)
    """Discount per token."""
    lam: float = number(0.95, minimum=0, maximum=1)
    """GAE: 0 trusts the critic after one token, 1 only the rewards."""
    bootstrap_truncated: bool = False
    """A completion cut off by its length ends with the critic's value of what might have followed;
    otherwise its end counts as one, worth its score."""
    normalize_advantages: bool = True
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""
    beta: float = number(0.05, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """See rlhf_pg.kl.kl_estimate."""

    critic: Literal["separate", "shared"] = "separate"
    """A model of its own, or a head on the policy's trunk."""
    value_model_name_or_path: str | None = None
    """Whose trunk a separate critic starts from (a reward model, say); None: the policy's."""
    value_learning_rate: float | None = number(None, above=0)
    """Peak learning rate of the critic; None: learning_rate."""
    vf_coef: float = number(0.1, minimum=0)
    """Coefficient of the value loss."""
    cliprange_value: float | None = number(0.2, above=0)
    """How far a value may move from the one at rollout before its loss is clipped; None: any."""

    def _check_estimator(self) -> None:
        if self.advantage_estimator in CRITIC_FREE:
            raise ValueError(
                f"advantage_estimator {self.advantage_estimator!r} makes no use of the critic that "
                f"PPO trains: choose {', '.join(sorted(NEED_CRITIC))}, or another algorithm"
            )
        super()._check_estimator()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic == "shared" and self.value_model_name_or_path is not None:
            raise ValueError(
                "value_model_name_or_path is for a separate critic: set critic to separate, or "
                "leave it out"
            )


@dataclass(kw_only=True)
class SFTConfig(Checked):
    """Supervised warm start of the embedded task (`recipes/sft.py`)."""

    algorithm: Literal["sft"] = "sft"
    """Which algorithm a recipe file is for."""
    task: Literal["arithmetic", "preference"] = "arithmetic"
    """The embedded task: its training split gives prompts and answers."""
    output_dir: str = "runs/sft_arithmetic"
    """Where the model goes, in `final/`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the initial weights and of the order of examples."""
    max_steps: int = number(600, minimum=1)
    """Optimizer steps."""
    label_smoothing: float = number(0.2, minimum=0, below=1)
    """Mass spread over the vocabulary: the model knows more answers than it will say."""
    batch_size: int = number(128, minimum=1)
    """Examples per step."""
    learning_rate: float = number(3e-3, above=0)
    """Peak learning rate of AdamW; it falls as a cosine."""


@dataclass(kw_only=True)
class RewardModelConfig(Checked):
    """A reward model from preference pairs (`recipes/reward_model.py`)."""

    algorithm: Literal["reward_model"] = "reward_model"
    """Which algorithm a recipe file is for."""
    model_name_or_path: str | None = None
    """Path or Hub id of the model to start from; without one, the task's own tiny model."""
    task: Literal["arithmetic", "preference"] = "preference"
    """The embedded task that a recipe takes its pairs from."""
    output_dir: str = "runs/reward_model_preference"
    """Where the model goes, in `final/`, and its held-out accuracy, in `metrics.json`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the new head and of the order of pairs."""
    max_steps: int = number(400, minimum=1)
    """Optimizer steps."""
    batch_size: int = number(64, minimum=1)
    """Pairs per step, over all processes."""
    max_length: int | None = number(None, minimum=1)
    """Longest text in tokens; None allows as many as the model has positions."""
    learning_rate: float = number(1e-5, above=0)
    """Peak learning rate of AdamW, after a tenth of the steps; then it falls as a cosine."""
