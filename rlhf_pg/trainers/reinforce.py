"""REINFORCE (Williams 1992): follow E[sum_t (G_t - b) grad log pi(y_t | x, y_<t)].

A baseline b that does not depend on the completion leaves the expectation as it is and lowers the
variance. The KL to the reference is paid token by token, as part of the reward.
"""

from rlhf_pg.config import ReinforceConfig
from rlhf_pg.trainers.step import PolicyGradientTrainer


class ReinforceTrainer(PolicyGradientTrainer):
    """REINFORCE: `ReinforceTrainer(model=..., reward_funcs=..., args=ReinforceConfig(...), ...)`.

    Advantages are the reward-to-go minus a baseline (`rlhf_pg.advantages.estimators`), and the
    loss is `rlhf_pg.losses.vanilla`:

        r_t = -beta (log pi_old(y_t) - log pi_ref(y_t)) + [t is the last token] R
        A_t = G_t - b,   G_t = sum_{i >= t} gamma^{i-t} r_i
        loss_t = -A_t log pi(y_t)

    By default b is the mean score of the other completions of the batch (unbiased);
    `returns_minus_mean` counts the own score too, which shrinks the gradient by 1 - 1/N; `returns`
    has none.

    See `PolicyGradientTrainer` for the arguments.
    """

    config_type = ReinforceConfig
