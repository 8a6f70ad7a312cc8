"""Configs of the algorithms: their own defaults, and the keys of PPO's critic."""

import math
from typing import ClassVar, Literal

from rlhf_pg.config import rules
from rlhf_pg.config.fields import FunctionName, Text, config, option, registry
from rlhf_pg.config.inputs import AdapterConfig, DataConfig, ModelConfig, RewardsConfig
from rlhf_pg.config.method import (
    ESTIMATORS,
    LOSSES,
    KLEstimator,
    MethodConfig,
    SamplingConfig,
    Traits,
)
from rlhf_pg.config.run import RunConfig, TrainingConfig


@config
class PolicyGradientConfig(
    MethodConfig,
    SamplingConfig,
    RunConfig,
    TrainingConfig,
    AdapterConfig,
    RewardsConfig,
    DataConfig,
    ModelConfig,
):
    """Config shared by all algorithms. One step is one rollout batch and every update on it."""

    has_critic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        rules.check(self)

    @property
    def warnings(self) -> list[str]:
        """Warnings, one sentence each, about settings that are allowed but rarely intended."""
        sentences = []
        if self.importance_sampling_level == "sequence" and self.aggregation != "sequence_mean":
            sentences.append(
                f"with importance_sampling_level sequence, aggregation {self.aggregation} gives "
                "long completions more weight: the GSPO paper uses sequence_mean"
            )
        averages = self.teacher_model_name_or_path == "policy" and self.teacher_mixup_alpha < 0.5
        if averages and self.teacher_mixup_alpha and self.dtype == "bfloat16" and not self.use_peft:
            sentences.append(
                "in bfloat16 a teacher_mixup_alpha below 0.5 loses small moves, so the teacher "
                "lags: train with use_peft, or in float32"
            )
        return sentences

    def total_steps(self, num_prompts: int) -> int:
        """Return the number of steps of the run on a dataset of `num_prompts`."""
        steps = math.ceil(self.num_train_epochs * num_prompts / self.prompts_per_step)
        if self.max_steps > 0:
            return self.max_steps
        return steps

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.num_mini_batches

    def correction_of(self, engine: str) -> str:
        """Return `sampler_correction` for a rollout engine, with auto resolved."""
        if self.sampler_correction != "auto":
            return self.sampler_correction
        same = engine in ("auto", "native") and not self.rollout_ahead
        return "none" if same else "token_truncate"

    @property
    def needs_old_logprobs(self) -> bool:
        """True if a step needs log-probabilities from before its updates. With a single update the
        ratio is 1, and only a KL in the reward or for the beta controller needs them."""
        paid = self.kl_placement == "reward" or self.kl_controller != "fixed"
        taught = self.teacher_placement == "reward"
        by_entropy = self.top_entropy_quantile < 1  # which the same pass measures
        return self.compares_with_old or taught or by_entropy or (self.beta > 0 and paid)

    @property
    def compares_distributions(self) -> bool:
        """True if the policy's whole distributions are compared with a teacher's."""
        teaches = self.teacher_model_name_or_path is not None and self.teacher_placement == "loss"
        return teaches and self.teacher_divergence != "sampled"

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the entropy is part of the loss, or may become so."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def compares_with_old(self) -> bool:
        """True if a step's updates or metrics compare with the policy before the updates."""
        return self.updates_per_step > 1 or self.follows_old_kl

    @property
    def follows_old_kl(self) -> bool:
        """True if a coefficient or rate follows KL(old || new) after a step's updates."""
        return self.old_kl_target is not None or self.kl_adaptive_lr is not None

    @property
    def estimator_traits(self) -> Traits:
        """What the advantage estimator needs; nothing if it is the user's."""
        return ESTIMATORS.get(self.advantage_estimator, Traits())

    @property
    def loss_traits(self) -> Traits:
        """What the policy loss needs; nothing if it is the user's."""
        return LOSSES.get(self.policy_loss, Traits())

    @property
    def has_functions(self) -> bool:
        """True unless the estimator or the loss is of another file, which `locate` loads."""
        names = {"advantage_estimator": self.advantage_estimator, "policy_loss": self.policy_loss}
        return all(name in registry(key) for key, name in names.items())

    @property
    def policy_frozen_until(self) -> int:
        """Number of steps at the start in which the policy is not updated."""
        return getattr(self, "value_pretraining_steps", 0)

    @property
    def critic_only_iterations(self) -> int:
        """Number of passes over each rollout batch that train the critic alone."""
        return getattr(self, "value_iterations", 0)


# fmt: off
@config
class GRPOConfig(PolicyGradientConfig):
    """Config of GRPO (DeepSeekMath): advantages normalised within the group, clipped surrogate."""

    algorithm: Literal["grpo"] = option("grpo")
    output_dir: Text = option("runs/grpo")
    num_generations: int = option(8, ge=2)
    scale_rewards: Literal["group", "batch", "mean", "none"] = option("group", "update",
        bias="every prompt weighs the same, hard or easy", help=
        "Divide centred scores by the group's or batch's deviation, the group's mean, or nothing.")
    scale_rewards_eps: float = option(1e-4, "update", ge=0, needs="scale_rewards group or batch",
        help=
        "Added to the deviation (verl: 1e-6).")


@config
class RLOOConfig(PolicyGradientConfig):
    """Config of RLOO: the mean of the other completions as the baseline, KL in the reward."""

    algorithm: Literal["rloo"] = option("rloo")
    output_dir: Text = option("runs/rloo")
    num_generations: int = option(4, ge=2)
    advantage_estimator: FunctionName = option("leave_one_out", names=ESTIMATORS)
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("constant")
    beta: float = option(0.05, ge=0)
    kl_placement: Literal["reward", "loss"] = option("reward")
    kl_estimator: KLEstimator = option("k1")


@config
class ReinforceConfig(PolicyGradientConfig):
    """Config of REINFORCE: reward-to-go minus a baseline, KL per token in the reward."""

    algorithm: Literal["reinforce"] = option("reinforce")
    output_dir: Text = option("runs/reinforce")
    num_generations: int = option(1, ge=1)
    gamma: float = option(1.0, "update", gt=0, le=1, bias="later rewards count less", help=
        "Discount factor per token.")
    advantage_estimator: FunctionName = option("returns_minus_others", names=ESTIMATORS, help=
        "Advantage estimator: returns has no baseline, returns_minus_others the mean of the other "
        "completions, returns_minus_mean the batch's (docs/algorithms.md).")
    policy_loss: FunctionName = option("vanilla", names=LOSSES)
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("constant")
    beta: float = option(0.05, ge=0)
    kl_placement: Literal["reward", "loss"] = option("reward")
    kl_estimator: KLEstimator = option("k1")


@config
class PPOConfig(PolicyGradientConfig):
    """Config of PPO: a critic and GAE, clipped surrogate, KL per token in the reward."""

    has_critic: ClassVar[bool] = True

    algorithm: Literal["ppo"] = option("ppo")
    output_dir: Text = option("runs/ppo")
    num_generations: int = option(1, ge=1)
    num_iterations: int = option(4, ge=1)
    beta: float = option(0.05, ge=0)
    kl_placement: Literal["reward", "loss"] = option("reward")
    kl_estimator: KLEstimator = option("k1")
    advantage_estimator: FunctionName = option("gae", names=ESTIMATORS, help=
        "Advantage estimator with a critic: gae, n_step or returns_minus_values.")
    gamma: float = option(1.0, "update", gt=0, le=1, bias="later rewards count less", help=
        "Discount factor per token.")
    lam: float = option(0.95, "update", ge=0, le=1, needs="lam_alpha none", help=
        "Lambda of GAE: 0 trusts the critic, 1 the rewards.")
    lam_alpha: float | None = option(None, "update", gt=0, help=
        "Length-adaptive GAE (VAPO): lam is 1 - 1 / (lam_alpha * length). None uses lam.")
    value_lam: float | None = option(None, "update", ge=0, le=1,
        needs="agent_credit episode and vf_coef", help=
        "Lambda of the critic's targets (VAPO: 1). None: the target is advantage + value.")
    n_steps: int | None = option(1, "update", ge=1, help=
        "Rewards that n_step sums before the critic's value. None: all to the end.")
    bootstrap_truncated: bool = option(False, "update", bias="mask_truncated_completions", help=
        "After a truncated completion use the critic's value instead of 0.")
    normalize_advantages: bool = option(True)

    critic: Literal["separate", "shared"] = option("separate", "run", help=
        "A separate model, or a head on the policy's trunk, which saves memory.")
    value_model_name_or_path: Text | None = option(None, "inputs",
        needs="critic separate and value_init pretrained", bias=None, help=
        "Model that a separate critic starts from, such as a reward model. None: the policy's.")
    value_init: Literal["pretrained", "random"] = option("pretrained", "run",
        needs="critic separate", bias=None, help=
        "Initialise a separate critic from pretrained or random weights.")
    value_learning_rate: float | None = option(None, "later", gt=0, help=
        "Learning rate of the critic. None: learning_rate.")
    value_pretraining_steps: int = option(0, "update", ge=0, needs="vf_coef", help=
        "Steps at the start that train only the critic (VAPO), before the policy's schedule.")
    value_iterations: int = option(0, "update", ge=0, needs="vf_coef", help=
        "Additional passes over a batch for the critic, or a shared critic's head (VPG, A2C).")
    normalize_values: bool = option(False, "run", needs="vf_coef", bias=None, help=
        "Train the critic on (return - running mean) / running std.")
    vf_coef: float = option(0.1, "update", ge=0,
        bias="the critic's loss moves weights that the policy shares", help=
        "Coefficient of the value loss; 0: no loss.")
    cliprange_value: float | None = option(0.2, "update", gt=0, help=
        "Largest change of a value before its loss is clipped. None: no clipping.")

    @property
    def critic_seed(self) -> int | None:
        """Seed of a critic's random weights; None for pretrained ones."""
        if self.value_init == "random":
            return self.seed
        return None
