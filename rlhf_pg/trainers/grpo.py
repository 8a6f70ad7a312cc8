"""Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath", section 4.1).

Every prompt x is answered G times; the group itself is the baseline, so no critic is needed.
Where this differs from the paper: tokens are averaged over the whole step (`aggregation:
token_mean`, as in DAPO), while the paper averages each completion first (`sequence_mean`), and
`beta` is 0 by default.
"""

from rlhf_pg.config import GRPOConfig
from rlhf_pg.trainers.step import PolicyGradientTrainer


class GRPOTrainer(PolicyGradientTrainer):
    """GRPO: `GRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)`.

    Advantages are scores normalised within the group (outcome supervision, section 4.1.2), the
    same for every token of a completion (`rlhf_pg.advantages.group_normalized`):

        A_{i,t} = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + scale_rewards_eps)

    The std, with Bessel's correction, makes easy and hard prompts weigh alike, which biases the
    gradient; `scale_rewards: none` leaves it out.

    The loss is the clipped surrogate of PPO plus a penalty on drifting from the reference (Eq. 3;
    `rlhf_pg.losses.clipped_surrogate`, `rlhf_pg.kl.kl_loss`):

        rho_t  = pi(y_t) / pi_old(y_t)
        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t) + beta KL_t
        KL_t   = exp(-u_t) - 1 + u_t,   u_t = log pi(y_t) - log pi_ref(y_t)      (k3, Eq. 4)

    See `PolicyGradientTrainer` for the arguments.
    """

    config_type = GRPOConfig
