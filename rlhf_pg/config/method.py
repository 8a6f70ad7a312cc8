"""What all algorithms share of the method: sampling, rewards, advantages, loss, KL."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config.fields import choice, number, parameters
from rlhf_pg.config.sampling import SamplingConfig
from rlhf_pg.losses import POLICY_LOSSES

KLEstimator = Literal["k1", "k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio"]


class CriticOptions(NamedTuple):
    """What a critic starts from."""

    shared: bool  # a head on the policy's trunk
    model: str | None  # path or Hub id whose trunk it takes; None: the policy's
    random_seed: int | None  # of random weights; None: weights as they were trained


@dataclass(kw_only=True)
class MethodConfig(SamplingConfig):
    """What all algorithms share of the method; `rlhf_pg.config.rules` says what goes together."""

    dynamic_sampling_rounds: int = number(0, minimum=0)
    """How often a step takes new prompts in place of groups to which the reward functions give
    equal scores (DAPO), penalties and a KL left aside. num_train_epochs counts the prompts that
    train."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off by their length out of the loss (DAPO's filtering), that
    of a critic too; baselines, statistics and reward metrics have them."""
    skip_zero_advantages: bool = False
    """Spare the update completions whose advantages are all 0. The gradient stays the same; metrics
    of the update (entropy, ratios, KL), and what goes by them, are of the others alone."""

    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; None weighs each by 1."""
    reward_model_sees_eos: bool = True
    """Behind a text that the policy ended by an EOS, a reward model reads the EOS of its own, where
    it is scored, as in Stiennon et al. 2020 and Huang et al. 2024; otherwise the words alone."""
    reward_model_closes_truncated: bool = False
    """A chat turn that was cut off is closed by the reward model's chat template; otherwise it
    reads the turn as it was left, without an end."""
    reward_clip_range: tuple[float, ...] | None = None
    """Lowest and highest score of each reward function, of a step or a completion; what is beyond
    is set to it."""
    reward_squash: Literal["none", "sigmoid", "min_max"] = "none"
    """Bring each score of the reward functions into [0, 1]: 1 / (1 + exp(-score)), or (score -
    lowest) / (highest - lowest) by those of its function in the step."""
    normalize_rewards: bool = False
    """Divide the scores of each reward function by their running standard deviation."""
    whiten_rewards: bool = False
    """Scale the rewards of all tokens of the step, the KL among them, to variance 1, keeping their
    mean; for estimators that look at nothing else."""
    missing_eos_penalty: float | None = number(None, minimum=0)
    """For completions that were cut off by their length."""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """The penalty is subtracted from their score, or minus the penalty is their whole score."""
    overlong_buffer: int | None = number(None, minimum=1)
    """Over the last so many tokens before max_completion_length a penalty rises to its full size
    (DAPO's soft overlong punishment)."""
    overlong_penalty: float = number(1.0, above=0)
    """Full size of that penalty."""

    advantage_estimator: str = choice("group_normalized", ADVANTAGES)
    """A name in rlhf_pg.advantages.ADVANTAGES; what each is stands in docs/algorithms.md."""
    normalize_advantages: bool = False
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""

    policy_loss: str = choice("clipped_surrogate", POLICY_LOSSES)
    """A name in rlhf_pg.losses.POLICY_LOSSES; whole methods (DAPO, GSPO) are in recipes/presets."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How tokens weigh in the loss: see rlhf_pg.losses.token_weights."""
    epsilon: float = number(0.2, above=0, maximum=1)
    """Clip distance of the ratio: below 1 by epsilon (1: no bound), above 1 by epsilon_high. The
    usual value goes by the loss: GMPO's paper has 0.4, GSPO's 3e-4, CISPO's 1."""
    epsilon_high: float | None = number(None, above=0)
    """Upper clip distance; None means epsilon."""
    delta: float | None = number(None, above=1)
    """Dual clip: bound of the ratio where the advantage is negative; None: no bound."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio for every token, or one for the completion, the geometric mean (GSPO)."""
    sapo_temperature_pos: float = number(1.0, above=0)
    """Of SAPO's soft gate, where the advantage is positive."""
    sapo_temperature_neg: float = number(1.05, above=0)
    """Likewise where it is negative."""
    old_kl_coef: float = number(1.0, minimum=0)
    """Coefficient of the KL between the policy and itself before the step (kl_penalty, mdpo)."""
    old_kl_target: float | None = number(None, above=0)
    """Halve or double that coefficient after a step to keep this KL(old || new) per token, measured
    after the last update by a forward pass of its own (PPO, section 4); None: fix it."""
    model_check: bool = True
    """See at the start, once, that the model gives a row the same log-probabilities alone, padded,
    packed, sampled and in an update; what differs is done otherwise or refused (docs/models.md)."""
    old_logprobs_source: Literal["policy", "sampler"] = "policy"
    """Where the policy's log-probabilities before the update come from, if something needs them: a
    forward pass, or what the native engine saw when it sampled, which spares that pass. The two
    differ by rounding: little in float32, up to a few percent of the ratio in bfloat16."""
    sampler_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    """Weigh the loss by policy / sampler probabilities: see rlhf_pg.losses.sampler_weights. auto:
    token_truncate where vLLM samples, whose numbers are not quite the policy's; else none."""
    sampler_clip_max: float = number(3.0, above=0)
    """Largest of these weights."""
    sampler_clip_min: float | None = number(None, above=0)
    """Smallest of them: a mask drops what is below, truncation raises it; None: 0."""
    entropy_coef: float = number(0.0, minimum=0)
    """Coefficient of the entropy, which is maximised."""
    entropy_target: float | None = number(None, above=0)
    """Move entropy_coef after every step to keep this entropy, in nats; None: fix it."""
    entropy_coef_delta: float = number(0.005, above=0)
    """By how much."""
    entropy_coef_min: float = number(0.0, minimum=0)
    """Its lowest value."""
    entropy_coef_max: float = number(1.0, minimum=0)
    """Its highest value."""

    positive_nll_coef: float = number(0.0, minimum=0)
    """Coefficient of the negative log-likelihood of right completions, a mean over their tokens in
    an update (VAPO; rlhf_pg.losses.positive_nll). 0: none."""
    positive_nll_threshold: float = number(0.5)
    """A completion is right for it if what the reward functions say, clipped, weighted and summed,
    is above this; penalties and a KL are left aside."""
    router_aux_loss_coef: float = number(0.0, minimum=0)
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of an update
    (rlhf_pg.models.experts); it costs one more forward pass per update, and needs
    disable_dropout. 0: none."""

    beta: float = number(0.0, minimum=0)
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    kl_placement: Literal["reward", "loss"] = "loss"
    """Where the KL enters: subtracted from the reward, or added to the loss."""
    kl_estimator: KLEstimator = "k3"
    """See rlhf_pg.kl.kl_estimate and, for the loss, rlhf_pg.kl.kl_loss."""
    kl_controller: Literal["fixed", "adaptive", "penalty"] = "fixed"
    """What beta does: stay; follow the KL in proportion (Ziegler 2019); halve or double (PPO)."""
    kl_target: float = number(6.0, above=0)
    """Mean KL of a completion, in nats, that a beta which moves aims at; that of the policy which
    sampled, before the step's updates."""
    kl_horizon: int = number(10000, minimum=1)
    """Completions over which an adaptive beta makes up for its error."""
    target_kl: float | None = number(None, above=0)
    """Stop a step's updates once the mean KL(old || new) of a minibatch is above 1.5 times this."""
    kl_adaptive_lr: float | None = number(None, above=0)
    """Scale the learning rates after a step to keep KL(old || new) per token, measured after the
    last update by a forward pass of its own, between half and twice this."""
    kl_adaptive_lr_min: float = number(0.1, above=0, maximum=1)
    """Lowest scale."""
    kl_adaptive_lr_max: float = number(10.0, minimum=1)
    """Highest scale."""
    sync_ref_model: bool = False
    """Let the reference follow the policy."""
    ref_model_sync_steps: int = number(512, minimum=1)
    """Every so many steps, after the updates."""
    ref_model_mixup_alpha: float = number(0.6, above=0, maximum=1)
    """Share of the policy in the new reference; 1 makes it a copy."""

    def correction_of(self, engine: str) -> str:
        """`sampler_correction`, with a name in place of auto, for a rollout engine by its name."""
        if self.sampler_correction != "auto":
            return self.sampler_correction
        return "none" if engine in ("auto", "native") else "token_truncate"

    @property
    def needs_old_logprobs(self) -> bool:
        """Of the policy before its update: with one update per rollout the ratio is 1 by
        construction, and then only a KL that is paid or measured asks for them.
        """
        paid = self.kl_placement == "reward" or self.kl_controller != "fixed"
        return self.compares_with_old or (self.beta > 0 and paid)

    @property
    def compares_with_old(self) -> bool:
        """Whether the updates of a step, or what measures them, look at the policy before it."""
        return self.updates_per_step > 1 or self.follows_old_kl

    @property
    def follows_old_kl(self) -> bool:
        """Whether something moves with how far the updates of a step have moved the policy."""
        return self.old_kl_target is not None or self.kl_adaptive_lr is not None

    @property
    def loss_options(self) -> set[str]:
        """The parameters of the policy loss."""
        return parameters(POLICY_LOSSES[self.policy_loss])

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def policy_frozen_until(self) -> int:
        """Steps at the start in which the policy stays as it is."""
        return 0

    @property
    def critic_only_iterations(self) -> int:
        """Passes over each rollout batch in which the critic alone learns."""
        return 0

    @property
    def critic_learning_rate(self) -> float:
        """Peak learning rate of a critic."""
        return self.learning_rate

    @property
    def critic_warmup_steps(self) -> int:
        """Steps of linear warm-up of a critic."""
        return self.warmup_steps

    @property
    def critic_schedule_keys(self) -> list[str]:
        """Keys that are set and that only the trainer's own schedule follows."""
        return []

    @property
    def critic_options(self) -> CriticOptions | None:
        """What a critic starts from, for an algorithm that has one."""
        return None
