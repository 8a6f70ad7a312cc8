"""REINFORCE Leave-One-Out (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics").

Every prompt is answered k times; the baseline of a completion is the mean score of the others, so
the gradient is unbiased (`aggregation: constant`). The KL to the reference is part of the reward.
"""

from torch import Tensor

from rlhf_pg.advantages import AdvantageInputs
from rlhf_pg.config import RLOOConfig
from rlhf_pg.data.records import Experience
from rlhf_pg.losses import Loss
from rlhf_pg.models import PolicyOutput
from rlhf_pg.trainers.base import PolicyGradientTrainer


class RLOOTrainer(PolicyGradientTrainer):
    """RLOO: `RLOOTrainer(model=..., reward_funcs=..., args=RLOOConfig(...), train_dataset=...)`.

    See `PolicyGradientTrainer` for the arguments.
    """

    config_type = RLOOConfig

    def advantages(self, signals: AdvantageInputs) -> Tensor:
        """The score, less the KL of the whole completion, against the mean of the others.

            R_i = r_i - beta sum_t (log pi_old(y_{i,t}) - log pi_ref(y_{i,t}))
            A_i = R_i - 1/(k-1) sum_{j != i} R_j

        The same for every token of a completion.
        """
        return self.estimator(signals)

    def loss(self, new: PolicyOutput, batch: Experience) -> Loss:
        """-min(rho_t A_i, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_i), rho_t = pi / pi_old.

        With one update per rollout rho is 1 and the gradient is that of -A_i log pi(y_i).
        """
        surrogate, metrics = self.surrogate(new, batch)
        regularizer, more = self.regularizer(new, batch)
        return surrogate + regularizer, metrics | more
