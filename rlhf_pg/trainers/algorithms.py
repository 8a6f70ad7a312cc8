"""The four algorithms: how scores become advantages, and the loss of a token.

Each is a step (`rlhf_pg.trainers.step`) with a config that chooses estimator, loss and aggregation
(`rlhf_pg.config.algorithms`); PPO adds a critic. y_t is a token of the completion y of the prompt
x, pi the policy, pi_old the one that sampled, pi_ref the reference.
"""

import torch
from torch import Tensor

from rlhf_pg.advantages import AdvantageInputs, gae
from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.losses import Loss, value_loss
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.run.objective import Term
from rlhf_pg.trainers.step import PolicyGradientTrainer


class GRPOTrainer(PolicyGradientTrainer):
    """Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", section 4.1).

        GRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

    G completions are sampled per prompt, and the group itself is the baseline, so no critic is
    needed. Advantages are scores normalised within the group (outcome supervision, section 4.1.2),
    the same for every token of a completion (`rlhf_pg.advantages.group_normalized`):

        A_{i,t} = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + scale_rewards_eps)

    Dividing by the std (with Bessel's correction) gives easy and hard prompts the same weight and
    biases the gradient; `scale_rewards: none` leaves it out.

    The loss is the clipped surrogate of PPO plus a penalty on drifting from the reference (Eq. 3;
    `rlhf_pg.losses.clipped_surrogate`, `rlhf_pg.kl.kl_loss`):

        rho_t  = pi(y_t) / pi_old(y_t)
        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t) + beta KL_t
        KL_t   = exp(-u_t) - 1 + u_t,   u_t = log pi(y_t) - log pi_ref(y_t)      (k3, Eq. 4)

    Elsewhere: the paper averages each completion first (`aggregation: sequence_mean`) and has a
    `beta`; here tokens are averaged over the whole step, as in DAPO, and `beta` is 0 by default.
    """

    config_type = GRPOConfig


class RLOOTrainer(PolicyGradientTrainer):
    """REINFORCE Leave-One-Out (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics").

        RLOOTrainer(model=..., reward_funcs=..., args=RLOOConfig(...), train_dataset=...)

    k completions are sampled per prompt; the gradient is unbiased (`aggregation: constant`). The
    advantage of a completion, the same for all its tokens, is its score minus its summed KL,
    relative to the mean of the others (`rlhf_pg.advantages.leave_one_out`):

        R_i = r_i - beta sum_t (log pi_old(y_{i,t}) - log pi_ref(y_{i,t}))
        A_i = R_i - 1/(k-1) sum_{j != i} R_j

    The loss is the clipped surrogate (`rlhf_pg.losses.clipped_surrogate`):

        loss_t = -min(rho_t A_i, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_i),  rho = pi / pi_old

    With one update per rollout rho is 1 and the gradient is that of -A_i log pi(y_i).
    """

    config_type = RLOOConfig


class ReinforceTrainer(PolicyGradientTrainer):
    """REINFORCE (Williams 1992): follow E[sum_t (G_t - b) grad log pi(y_t | x, y_<t)].

        ReinforceTrainer(model=..., reward_funcs=..., args=ReinforceConfig(...), ...)

    A baseline b that does not depend on the completion lowers the variance without changing the
    expectation. Advantages are the reward-to-go minus b (`rlhf_pg.advantages.estimators`), and the
    loss is `rlhf_pg.losses.vanilla`:

        r_t = -beta (log pi_old(y_t) - log pi_ref(y_t)) + [t is the last token] R
        A_t = G_t - b,   G_t = sum_{i >= t} gamma^{i-t} r_i
        loss_t = -A_t log pi(y_t)

    By default b is the mean score of the other completions of the batch (unbiased);
    `returns_minus_mean` includes a completion's own score, which shrinks the gradient by 1 - 1/N;
    `returns` has no baseline.
    """

    config_type = ReinforceConfig


class PPOTrainer(PolicyGradientTrainer):
    """Proximal Policy Optimization (Schulman et al. 2017) as used for language models
    (Ziegler et al. 2019; Stiennon et al. 2020): a critic values every prefix.

        PPOTrainer(model=..., reward_funcs=..., args=PPOConfig(...), value_model=None, ...)

    Args:
        value_model: what the critic starts from: a path, a Hub id or an object. A `transformers`
            model (like the policy, or a reward model) lends its trunk, and the head starts at 0;
            any other module gives the values itself (see `rlhf_pg.models.Critic`). By default
            `args.value_model_name_or_path`, or else a copy of the policy.

    Advantages are those of generalised advantage estimation (Schulman et al. 2016, Eq. 16;
    `rlhf_pg.advantages.gae`):

        r_t     = -beta (log pi_old(y_t) - log pi_ref(y_t)) + s_t
        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}

    s_t is the score of the step that ends at token t; the score of a whole completion is paid at
    its last token. V_t is the value of the prefix before token t. After the last token it is 0, or
    the critic's value if the completion was truncated and `bootstrap_truncated` is set. The A_t in
    the loss are whitened (`normalize_advantages`). Other estimators with a critic are `n_step`
    (A2C) and `returns_minus_values` (VPG).

    Elsewhere: those papers whiten advantages over a minibatch; here it is the whole step on all
    processes. The score is paid at the last token that the policy chose, whether or not it is EOS,
    and no token after it is scored or trained on.
    """

    config_type = PPOConfig
    args: PPOConfig

    def returns(self, inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
        """Compute the targets of the critic, in reward units.

            R_t = A_t + V_t

        This is the lambda-return, the n-step target or the reward-to-go, depending on the
        estimator. `value_lam` sets a lambda for the critic alone (VAPO; Yue et al. 2025: 1).
        """
        args = self.args
        if args.value_lam is not None:
            rewards = inputs.rewards
            values = inputs.values
            end = inputs.bootstrap_value
            return gae(rewards, values, inputs.mask, args.gamma, args.value_lam, end)[1]
        targets: Tensor = advantages + inputs.values
        return targets

    def terms(self) -> list[Term]:
        """Add the critic's loss to the clipped surrogate and an entropy bonus (Eq. 9, negated).

            rho_t   = pi(y_t) / pi_old(y_t)
            loss_t  = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t)
                      + vf_coef 1/2 max((V_t - R_t)^2, (V_clipped - R_t)^2) - entropy_coef H_t

        With `normalize_values`, the old and the new V_t are raw outputs of the critic, and R_t is
        normalised by the running mean and deviation of all returns, including this step's. When
        these change, the critic is not adjusted, so its values change with them.

        Elsewhere: skrl takes the old V_t in the units after the change and the new one in those
        before it: the clip then restrains a critic that has not changed yet.
        """
        value = Term(name="value", loss=self.critic_loss, coef=self.args.vf_coef)
        return [*super().terms(), value]

    def critic_loss(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Return the squared error of the critic's values (`rlhf_pg.losses.value_loss`)."""
        loss, metrics = value_loss(
            new.values,
            batch.values,
            batch.returns,
            batch.action_mask,
            self.args.cliprange_value,
        )
        return loss, {"value_loss": loss} | metrics

    def values_of(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return values (B,T), and the values after completions (B,), 0 for one that ended; in
        reward units.
        """
        values = batch.values
        end = batch.end_values
        moments = self.value_moments
        if moments is not None:
            values = torch.where(batch.action_mask, moments.denormalize(values), 0.0)
            end = moments.denormalize(end)
        if not self.args.bootstrap_truncated:
            return values, None
        return values, end.where(batch.truncated, 0.0)

    def critic_targets(
        self, inputs: AdvantageInputs, advantages: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the targets in the critic's units; the moments include this step."""
        returns = self.returns(inputs, advantages)
        mask = inputs.mask
        moments = self.value_moments
        mean, var = self.runtime.mean_and_var(returns, mask)
        _, unexplained = self.runtime.mean_and_var(returns - inputs.values, mask)
        # 1 for a perfect critic, 0 for one no better than the mean.
        metrics = {"explained_variance": (1 - unexplained / var).item()}
        if moments is None:
            return returns, metrics
        if var.isfinite():  # else the updates with these returns are skipped
            count = float(self.runtime.all_reduce_sum(mask.sum()))
            moments.update(count, float(mean), float(var))
        return torch.where(mask, moments.normalize(returns), 0.0), metrics
