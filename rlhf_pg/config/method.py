"""Keys that all algorithms share, on the method: rewards, advantages, loss and KL."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.config.fields import choice, number, parameters
from rlhf_pg.config.sampling import SamplingConfig
from rlhf_pg.losses import POLICY_LOSSES

KLEstimator = Literal["k1", "k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio"]


class CriticOptions(NamedTuple):
    """The kind of a critic and the weights that it starts from."""

    shared: bool  # a head on the policy's trunk
    model: str | None  # path or Hub id whose trunk it takes; None: the policy's
    random_seed: int | None  # of random weights; None: weights as they were trained
    learning_rate: float  # at its peak


@dataclass(kw_only=True)
class MethodConfig(SamplingConfig):
    """Config of the method; `rlhf_pg.config.rules` checks which keys go together."""

    dynamic_sampling_rounds: int = number(0, minimum=0)
    """Most rounds in which a step samples new prompts in place of groups of equal scores (DAPO); 0
    keeps these groups. Penalties and the KL are no part of these scores, and num_train_epochs
    counts only the prompts that train."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off by their length out of the losses of policy and critic
    (DAPO). They still count in baselines, statistics and reward metrics."""

    reward_weights: tuple[float, ...] | None = None
    """Weights of the reward functions, one for each; None gives all of them weight 1."""
    reward_workers: int = number(0, minimum=0)
    """Processes, for each process that trains, in which plain Python reward functions run while
    other completions are sampled, once for every prompt. 0 runs them in the trainer, once a step.
    """
    reward_timeout: float | None = number(None, above=0)
    """Seconds for a call of a reward function in reward_workers, which is killed then, or of an
    async one, which is cancelled. None waits for ever."""
    on_reward_error: Literal["error", "drop", "value"] = "error"
    """Effect of a reward function that raises, hangs, crashes or answers nonsense: the run ends
    (error), the function does not apply to these completions (drop), or it gives them
    reward_error_value (value). A batch in which all of them fail ends the run."""
    reward_error_value: float = number(0.0)
    """Score of a completion on which a reward function fails, with on_reward_error value."""
    reward_model_sees_eos: bool = True
    """Append the reward model's EOS to texts that the policy ended with an EOS, and score it there
    (Stiennon et al. 2020; Huang et al. 2024). Otherwise the reward model reads only the words."""
    reward_clip_range: tuple[float, ...] | None = None
    """Lowest and highest score that a reward function may give, for a step or a completion; scores
    outside are clipped. None does not clip."""
    reward_squash: Literal["none", "sigmoid", "min_max"] = "none"
    """Map every score into [0, 1]: sigmoid takes 1 / (1 + exp(-score)), min_max takes (score -
    lowest) / (highest - lowest) over the scores of its function in the step."""
    normalize_rewards: bool = False
    """Divide the scores of each reward function by their running standard deviation."""
    whiten_rewards: bool = False
    """Scale the rewards of all tokens of the step, KL included, to variance 1 and keep their mean;
    only for estimators that use nothing but these rewards."""
    missing_eos_penalty: float | None = number(None, minimum=0)
    """Penalty for completions that were cut off by their length, in units of the score; None sets
    none."""
    missing_eos_mode: Literal["subtract", "replace"] = "subtract"
    """Subtract missing_eos_penalty from the score, or replace the score by minus the penalty."""
    overlong_buffer: int | None = number(None, minimum=1)
    """Tokens before max_completion_length over which a penalty rises from 0 to overlong_penalty
    (DAPO's soft overlong punishment); None sets none."""
    overlong_penalty: float = number(1.0, above=0)
    """Penalty at the end of overlong_buffer, in units of the score."""

    advantage_estimator: str = choice("group_normalized", ADVANTAGES)
    """Name of the advantage estimator, a key of rlhf_pg.advantages.ADVANTAGES (see
    docs/algorithms.md)."""
    normalize_advantages: bool = False
    """Whiten advantages over all tokens of the step: mean 0, variance 1."""

    policy_loss: str = choice("clipped_surrogate", POLICY_LOSSES)
    """Name of the policy loss, a key of rlhf_pg.losses.POLICY_LOSSES (see docs/algorithms.md);
    whole methods (DAPO, GSPO) are in recipes/presets."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Weight of each token in the loss: 1 / tokens (token_mean), 1 / (completions * own length)
    (sequence_mean) or 1 / (completions * max_completion_length) (constant)."""
    epsilon: float = number(0.2, above=0, maximum=1)
    """Clip distance of the ratio below 1 (1 sets no lower bound), and above 1 unless epsilon_high
    is set. The usual value depends on the loss: GSPO's paper has 3e-4, CISPO's 1."""
    epsilon_high: float | None = number(None, above=0)
    """Clip distance of the ratio above 1; None uses epsilon."""
    delta: float | None = number(None, above=1)
    """Upper bound of the ratio where the advantage is negative (dual clip); None sets no bound."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the ratio: one for every token, or one for the whole completion, its geometric mean
    (GSPO)."""
    sapo_temperature_pos: float = number(1.0, above=0)
    """Temperature of SAPO's soft gate where the advantage is positive."""
    sapo_temperature_neg: float = number(1.05, above=0)
    """Temperature of SAPO's soft gate where the advantage is negative."""
    old_kl_coef: float = number(1.0, minimum=0)
    """Coefficient of the KL between the policy before the step and the policy now (kl_penalty)."""
    old_kl_target: float | None = number(None, above=0)
    """Target of KL(old || new) in nats per token: old_kl_coef is halved or doubled after a step to
    keep it (PPO, section 4), at the cost of one forward pass. None fixes old_kl_coef."""
    sampler_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    """Weight the loss by policy / sampler probabilities (rlhf_pg.losses.sampler_weights). auto is
    token_truncate with vLLM, whose probabilities differ slightly from the policy's, otherwise none.
    """
    sampler_clip_max: float = number(3.0, above=0)
    """Largest weight of sampler_correction."""
    sampler_clip_min: float | None = number(None, above=0)
    """Smallest weight of sampler_correction: a mask drops what is below, truncation raises it. None
    is 0."""
    entropy_coef: float = number(0.0, minimum=0)
    """Coefficient of the entropy bonus; raise it if the policy's entropy collapses."""
    entropy_target: float | None = number(None, above=0)
    """Entropy per token, in nats, that entropy_coef is moved after every step to keep; None fixes
    it."""
    entropy_coef_delta: float = number(0.005, above=0)
    """Change of entropy_coef in one step, with entropy_target."""
    entropy_coef_min: float = number(0.0, minimum=0)
    """Lowest entropy_coef that entropy_target may set."""
    entropy_coef_max: float = number(1.0, minimum=0)
    """Highest entropy_coef that entropy_target may set."""

    positive_nll_coef: float = number(0.0, minimum=0)
    """Coefficient of the negative log-likelihood of right completions, averaged over their tokens
    in an update (VAPO; rlhf_pg.losses.positive_nll). 0 leaves it out."""
    positive_nll_threshold: float = number(0.5)
    """Score above which positive_nll_coef counts a completion as right: the clipped, weighted sum
    of the reward functions, without penalties and KL."""
    router_aux_loss_coef: float = number(0.0, minimum=0)
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of an update
    (rlhf_pg.models.experts). It costs one forward pass per update and needs disable_dropout. 0
    leaves it out."""

    beta: float = number(0.0, minimum=0)
    """Coefficient of KL(policy || reference), which holds the policy near it; 0 keeps no
    reference."""
    kl_placement: Literal["reward", "loss"] = "loss"
    """Place of the KL: subtracted from the reward of each token, or added to the loss."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; k2, k3, k1_to_go,
    k2_straight_through or k3_ratio in the loss."""
    kl_controller: Literal["fixed", "adaptive", "penalty"] = "fixed"
    """Rule that moves beta after a step: none (fixed), in proportion to the KL's error (adaptive;
    Ziegler 2019), or by halving and doubling (penalty; PPO)."""
    kl_target: float = number(6.0, above=0)
    """KL to the reference in nats per completion that a moving beta aims at; it is measured on the
    policy that sampled, before the step's updates."""
    kl_horizon: int = number(10000, minimum=1)
    """Completions over which an adaptive beta corrects its error; more make it slower."""
    target_kl: float | None = number(None, above=0)
    """KL(old || new) in nats per token that bounds a step: its updates stop once a minibatch is
    above 1.5 times this. None never stops them."""
    kl_adaptive_lr: float | None = number(None, above=0)
    """Target of KL(old || new) in nats per token: the learning rates are scaled after a step to
    keep it between half and twice this, from a tenth to ten times what the schedule says, at the
    cost of one forward pass. None does not scale them."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_sync_steps: int = number(512, minimum=1)
    """Steps between two moves of the reference, each after the step's updates."""
    ref_model_mixup_alpha: float = number(0.6, above=0, maximum=1)
    """Share of the policy in the moved reference; 1 makes it a copy of the policy."""

    def correction_of(self, engine: str) -> str:
        """Return `sampler_correction` for a rollout engine's name, with auto resolved."""
        if self.sampler_correction != "auto":
            return self.sampler_correction
        return "none" if engine in ("auto", "native") else "token_truncate"

    @property
    def needs_old_logprobs(self) -> bool:
        """True if a step needs the policy's log-probabilities from before its updates. With one
        update per rollout the ratio is 1 by construction, and only a KL in the reward, or one that
        moves beta, needs them.
        """
        paid = self.kl_placement == "reward" or self.kl_controller != "fixed"
        return self.compares_with_old or (self.beta > 0 and paid)

    @property
    def compares_with_old(self) -> bool:
        """True if a step's updates, or what measures them, compare with the policy before them."""
        return self.updates_per_step > 1 or self.follows_old_kl

    @property
    def follows_old_kl(self) -> bool:
        """True if a coefficient or rate follows how far a step's updates have moved the policy."""
        return self.old_kl_target is not None or self.kl_adaptive_lr is not None

    @property
    def loss_options(self) -> set[str]:
        """The names of the policy loss's parameters."""
        return parameters(POLICY_LOSSES[self.policy_loss])

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def policy_frozen_until(self) -> int:
        """Number of steps at the start in which the policy is not updated."""
        return 0

    @property
    def critic_only_iterations(self) -> int:
        """Number of passes over each rollout batch that train the critic alone."""
        return 0

    @property
    def critic_options(self) -> CriticOptions | None:
        """The critic's options, for an algorithm that has a critic."""
        return None
