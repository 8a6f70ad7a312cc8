"""REINFORCE Leave-One-Out (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics").

Every prompt is answered k times; the baseline of a completion is the mean score of the others, so
the gradient is unbiased (`aggregation: constant`). The KL to the reference is part of the reward.
"""

from rlhf_pg.config import RLOOConfig
from rlhf_pg.trainers.step import PolicyGradientTrainer


class RLOOTrainer(PolicyGradientTrainer):
    """RLOO: `RLOOTrainer(model=..., reward_funcs=..., args=RLOOConfig(...), train_dataset=...)`.

    The advantage of a completion, the same for all its tokens, is its score, less its whole KL,
    against the mean of the others (`rlhf_pg.advantages.leave_one_out`):

        R_i = r_i - beta sum_t (log pi_old(y_{i,t}) - log pi_ref(y_{i,t}))
        A_i = R_i - 1/(k-1) sum_{j != i} R_j

    The loss is the clipped surrogate (`rlhf_pg.losses.clipped_surrogate`):

        loss_t = -min(rho_t A_i, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_i),  rho = pi / pi_old

    With one update per rollout rho is 1 and the gradient is that of -A_i log pi(y_i).

    See `PolicyGradientTrainer` for the arguments.
    """

    config_type = RLOOConfig
