"""REINFORCE (Williams 1992): follow E[sum_t (G_t - b) grad log pi(y_t | x, y_<t)].

A baseline b that does not depend on the completion leaves the expectation as it is and lowers the
variance. The KL to the reference is paid token by token, as part of the reward.
"""

from torch import Tensor

from rlhf_pg.advantages import AdvantageInputs
from rlhf_pg.config import ReinforceConfig
from rlhf_pg.data.records import Experience
from rlhf_pg.losses import Loss
from rlhf_pg.models import PolicyOutput
from rlhf_pg.trainers.base import PolicyGradientTrainer


class ReinforceTrainer(PolicyGradientTrainer):
    """REINFORCE: `ReinforceTrainer(model=..., reward_funcs=..., args=ReinforceConfig(...), ...)`.

    See `PolicyGradientTrainer` for the arguments.
    """

    config_type = ReinforceConfig

    def advantages(self, signals: AdvantageInputs) -> Tensor:
        """Reward-to-go minus a baseline.

            r_t = -beta (log pi_old(y_t) - log pi_ref(y_t)) + [t is the last token] R
            A_t = G_t - b,   G_t = sum_{i >= t} gamma^{i-t} r_i

        By default b is the mean score of the other completions of the batch (unbiased);
        `returns_minus_mean` counts the own score too, which shrinks the gradient by 1 - 1/N;
        `returns` has none.
        """
        return self.estimator(signals)

    def loss(self, new: PolicyOutput, batch: Experience) -> Loss:
        """-A_t log pi(y_t)."""
        surrogate, metrics = self.surrogate(new, batch)
        regularizer, more = self.regularizer(new, batch)
        return surrogate + regularizer, metrics | more
