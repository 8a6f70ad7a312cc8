"""What each algorithm has of its own: other defaults, and PPO the keys of its critic."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config.fields import choice, number
from rlhf_pg.config.method import CriticOptions, KLEstimator
from rlhf_pg.config.policy_gradient import PolicyGradientConfig
from rlhf_pg.losses import POLICY_LOSSES


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
    scale_rewards_eps: float = number(1e-4, minimum=0)
    """Added to that std (TRL has 1e-4 too, verl and NeMo-RL 1e-6)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "is added to a std, of which scale_rewards none has none: leave one of them out"
        self.refuse_idle(("scale_rewards_eps",), self.scale_rewards != "none", why)


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
    kl_estimator: KLEstimator = "k1"
    """See rlhf_pg.kl.kl_estimate and, for the loss, rlhf_pg.kl.kl_loss."""


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
    kl_estimator: KLEstimator = "k1"
    """See rlhf_pg.kl.kl_estimate and, for the loss, rlhf_pg.kl.kl_loss."""


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
    lam_alpha: float | None = number(None, above=0)
    """GAE with lam = 1 - 1 / (lam_alpha * length) for each completion (VAPO); None: lam."""
    value_lam: float | None = number(None, minimum=0, maximum=1)
    """Lam of the critic's targets (VAPO: 1); None: they are advantage + value."""
    n_steps: int | None = number(1, minimum=1)
    """Of n_step: rewards before the critic takes over; None: all to the end."""
    bootstrap_truncated: bool = False
    """A completion cut off by its length ends with the critic's value of what might have followed;
    otherwise its end counts as one, worth its score."""
    normalize_advantages: bool = True
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""
    beta: float = number(0.05, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: KLEstimator = "k1"
    """See rlhf_pg.kl.kl_estimate and, for the loss, rlhf_pg.kl.kl_loss."""

    critic: Literal["separate", "shared"] = "separate"
    """A model of its own, or a head on the policy's trunk."""
    value_model_name_or_path: str | None = None
    """Whose trunk a separate critic starts from (a reward model, say); None: the policy's."""
    value_init: Literal["pretrained", "random"] = "pretrained"
    """Its trunk as it was trained, or the policy's architecture with random weights."""
    value_learning_rate: float | None = number(None, above=0)
    """Peak learning rate of the critic; None: learning_rate."""
    value_warmup_steps: int | None = number(None, minimum=0)
    """Steps of linear warm-up of the critic; None: warmup_steps."""
    value_pretraining_steps: int = number(0, minimum=0)
    """Steps at the start in which the critic alone is trained (VAPO); the schedule and the warm-up
    of the policy come after them."""
    value_iterations: int = number(0, minimum=0)
    """Further passes over each rollout batch that train the critic alone, after those that train
    both: several of its updates for one of the policy (VPG, A2C). Of a shared critic the head."""
    normalize_values: bool = False
    """Let the critic predict returns less their running mean, over their running deviation; the
    value loss and cliprange_value are in these units."""
    vf_coef: float = number(0.1, minimum=0)
    """Coefficient of the value loss."""
    cliprange_value: float | None = number(0.2, above=0)
    """How far a value may move from the one at rollout before its loss is clipped; None: any."""

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
    def critic_learning_rate(self) -> float:
        return self.value_learning_rate or self.learning_rate

    @property
    def critic_warmup_steps(self) -> int:
        return self.warmup_steps if self.value_warmup_steps is None else self.value_warmup_steps

    @property
    def critic_schedule_keys(self) -> list[str]:
        keys = {
            "value_pretraining_steps": self.value_pretraining_steps > 0,
            "value_warmup_steps": self.value_warmup_steps is not None,
        }
        return [key for key, is_set in keys.items() if is_set]

    @property
    def critic_options(self) -> CriticOptions:
        seed = self.seed if self.value_init == "random" else None
        return CriticOptions(self.critic == "shared", self.value_model_name_or_path, seed)
