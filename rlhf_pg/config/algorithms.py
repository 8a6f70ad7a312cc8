"""Configs of the algorithms: their own defaults, and the keys of PPO's critic."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config import rules
from rlhf_pg.config.fields import choice, number
from rlhf_pg.config.method import CriticOptions, KLEstimator, MethodConfig
from rlhf_pg.losses import POLICY_LOSSES


@dataclass(kw_only=True)
class PolicyGradientConfig(MethodConfig):
    """Config shared by all algorithms. One step is one rollout batch and every update on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rules.check(self)

    @property
    def warnings(self) -> list[str]:
        """Warnings, one sentence each, about settings that are allowed but seldom meant."""
        return rules.warnings(self)


@dataclass(kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """Config of GRPO (DeepSeekMath): advantages normalised within the group, clipped surrogate."""

    algorithm: Literal["grpo"] = "grpo"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/grpo"
    """Directory for everything that the run writes."""
    num_generations: int = number(8, minimum=2, because="a group of one has no spread to compare")
    """Completions per prompt (its group); more make a better baseline and cost more time."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the centred scores: the standard deviation of their group or of the batch, or
    none."""
    scale_rewards_eps: float = number(1e-4, minimum=0)
    """Constant added to the standard deviation that scores are divided by (TRL has 1e-4 too, verl
    and NeMo-RL 1e-6)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "is added to a std, of which scale_rewards none has none: leave one of them out"
        self.refuse_idle(("scale_rewards_eps",), self.scale_rewards != "none", why)


@dataclass(kw_only=True)
class KLInRewardConfig(PolicyGradientConfig):
    """Config of an algorithm whose reward has the KL to a reference in it."""

    beta: float = number(0.05, minimum=0)
    """Coefficient of KL(policy || reference), which holds the policy near it; 0 keeps no
    reference."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Place of the KL: subtracted from the reward of each token, or added to the loss."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; k2, k3, k1_to_go,
    k2_straight_through or k3_ratio in the loss."""


@dataclass(kw_only=True)
class RLOOConfig(KLInRewardConfig):
    """Config of RLOO: the mean of the other completions as the baseline, KL in the reward."""

    algorithm: Literal["rloo"] = "rloo"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/rloo"
    """Directory for everything that the run writes."""
    num_generations: int = number(4, minimum=2, because="leaving one out needs others to compare")
    """Completions per prompt (its group); more make a better baseline and cost more time."""
    advantage_estimator: str = choice("leave_one_out", ADVANTAGES)
    """Name of the advantage estimator, a key of rlhf_pg.advantages.ADVANTAGES (see
    docs/algorithms.md)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "constant"
    """Weight of each token in the loss: 1 / tokens (token_mean), 1 / (completions * own length)
    (sequence_mean) or 1 / (completions * max_completion_length) (constant)."""


@dataclass(kw_only=True)
class ReinforceConfig(KLInRewardConfig):
    """Config of REINFORCE: reward-to-go minus a baseline, KL per token in the reward."""

    algorithm: Literal["reinforce"] = "reinforce"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/reinforce"
    """Directory for everything that the run writes."""
    num_generations: int = number(1, minimum=1)
    """Completions sampled per prompt."""
    gamma: float = number(1.0, above=0, maximum=1)
    """Discount factor per token; below 1, earlier tokens get less of the final score."""
    advantage_estimator: str = choice("returns_minus_others", ADVANTAGES)
    """Name of the advantage estimator (see docs/algorithms.md): returns has no baseline,
    returns_minus_others the mean of the other completions, returns_minus_mean that of the batch."""
    policy_loss: str = choice("vanilla", POLICY_LOSSES)
    """Name of the policy loss, a key of rlhf_pg.losses.POLICY_LOSSES (see docs/algorithms.md)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "constant"
    """Weight of each token in the loss: 1 / tokens (token_mean), 1 / (completions * own length)
    (sequence_mean) or 1 / (completions * max_completion_length) (constant)."""


@dataclass(kw_only=True)
class PPOConfig(KLInRewardConfig):
    """Config of PPO: a critic and GAE, clipped surrogate, KL per token in the reward."""

    algorithm: Literal["ppo"] = "ppo"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    output_dir: str = "runs/ppo"
    """Directory for everything that the run writes."""
    num_generations: int = number(1, minimum=1)
    """Completions sampled per prompt."""
    num_iterations: int = number(4, minimum=1)
    """Passes over each rollout batch (PPO epochs); more move the policy further in a step."""
    advantage_estimator: str = choice("gae", ADVANTAGES)
    """Name of an advantage estimator that uses the critic: gae, n_step or returns_minus_values."""
    gamma: float = number(1.0, above=0, maximum=1)
    """Discount factor per token; below 1, earlier tokens get less of the final score."""
    lam: float = number(0.95, minimum=0, maximum=1)
    """Lambda of GAE: 0 trusts the critic after one token, 1 only the rewards."""
    lam_alpha: float | None = number(None, above=0)
    """Length-adaptive GAE (VAPO): lam is 1 - 1 / (lam_alpha * length) for each completion. None
    uses lam for all."""
    value_lam: float | None = number(None, minimum=0, maximum=1)
    """Lambda of GAE for the critic's targets (VAPO has 1). None takes advantage + value as the
    target."""
    n_steps: int | None = number(1, minimum=1)
    """Rewards that the estimator n_step sums before it takes the critic's value; None sums all to
    the end."""
    bootstrap_truncated: bool = False
    """End a completion that was cut off by its length with the critic's value of what would follow;
    otherwise the cut counts as a true end, with a value of 0."""
    normalize_advantages: bool = True
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""

    critic: Literal["separate", "shared"] = "separate"
    """Kind of critic: a model of its own, or a head on the policy's trunk, which saves memory."""
    value_model_name_or_path: str | None = None
    """Path or Hub id of the model whose trunk a separate critic starts from, such as a reward
    model. None takes the policy's."""
    value_init: Literal["pretrained", "random"] = "pretrained"
    """Initial trunk of a separate critic: pretrained weights, or the policy's architecture with
    random weights."""
    value_learning_rate: float | None = number(None, above=0)
    """Peak learning rate of the critic; None uses learning_rate."""
    value_pretraining_steps: int = number(0, minimum=0)
    """Steps at the start that train the critic alone (VAPO); the policy's schedule and warm-up
    begin after them."""
    value_iterations: int = number(0, minimum=0)
    """Extra passes over each rollout batch that train the critic alone, after those that train both
    (VPG, A2C). Of a shared critic they train only the head."""
    normalize_values: bool = False
    """Let the critic predict (return - running mean) / running standard deviation. The value loss
    and cliprange_value are then in these units."""
    vf_coef: float = number(0.1, minimum=0)
    """Coefficient of the value loss; 0 leaves the critic untrained."""
    cliprange_value: float | None = number(0.2, above=0)
    """Largest change of a value since the rollout before its loss is clipped; None does not
    clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam_alpha is not None:
            self.refuse_idle(("lam",), False, "is not used with lam_alpha: leave one of them out")
        if self.critic == "shared":
            own = ("value_model_name_or_path", "value_init")
            self.refuse_idle(
                own, False, "is for a separate critic: set critic to separate, or leave it out"
            )
        if self.value_init == "random" and self.use_peft:
            raise ValueError(
                "value_init random has no weights worth an adapter: leave out use_peft"
            )
        if self.value_init == "random" and self.value_model_name_or_path is not None:
            raise ValueError(
                "value_init random takes the policy's architecture: leave out "
                "value_model_name_or_path"
            )
        taught = ("value_lam", "value_pretraining_steps", "value_iterations", "normalize_values")
        self.refuse_idle(
            taught, self.vf_coef > 0, "is for a critic that learns: set vf_coef, or leave it out"
        )

    @property
    def has_critic(self) -> bool:
        return True

    @property
    def policy_frozen_until(self) -> int:
        return self.value_pretraining_steps

    @property
    def critic_only_iterations(self) -> int:
        return self.value_iterations

    @property
    def critic_options(self) -> CriticOptions:
        return CriticOptions(
            shared=self.critic == "shared",
            model=self.value_model_name_or_path,
            random_seed=self.seed if self.value_init == "random" else None,
            learning_rate=self.value_learning_rate or self.learning_rate,
        )
