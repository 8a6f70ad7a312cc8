"""Advantage estimators: how much better each token or completion was than expected.

`per_token` works along the tokens of a row, `per_group` compares the completions of a prompt, and
`estimators` has `ADVANTAGES`, the functions of `AdvantageInputs` that a config selects.

Shapes: B rows and T columns on this rank, N rows on all ranks. Every function returns detached
tensors in the floating dtype of its input, with 0 in masked slots. A mask may have holes (tool
output): False slots are skipped, t+1 means the next True slot, and gamma and lam count True slots.

Many papers correspond to one estimator with one or two options:

    REINFORCE (Williams 1992)    returns, or one of returns_minus_* for a baseline; total_returns is
                                 its original form, without reward-to-go
    VPG                          returns_minus_values
    online, multi-step A2C       n_step with n_steps 1, or None to the end of the row
    PPO (Schulman 2017)          gae
    VAPO (Yue 2025)              gae with lam_alpha; the critic's targets come from a second `gae`
                                 with its own lam
    GRPO (Shao 2024)             group_normalized; process_group_normalized where steps have scores
    Dr. GRPO (Liu 2025)          group_normalized with scale_rewards "none"
    MaxRL (Tajwar 2026)          group_normalized with scale_rewards "mean"
    GDPO (Liu 2026)              group_normalized_per_source
    RLOO (Ahmadian 2024)         leave_one_out
    ReMax (Li 2023)              returns_minus_greedy
    OPO (Hao 2025)               returns_minus_optimal; examples/optimal_baseline.py has the norms
                                 that OPO approximates by lengths
    REINFORCE++ (Hu 2025)        returns, whitened over the batch (`normalize_advantages`)
    REINFORCE++ with a baseline  group_normalized with scale_rewards "none", whitened too
"""

from rlhf_pg.advantages.estimators import (
    ADVANTAGES as ADVANTAGES,
    AdvantageInputs as AdvantageInputs,
    total_scores as total_scores,
)
from rlhf_pg.advantages.per_group import (
    SCALES as SCALES,
    group_normalized as group_normalized,
    group_stats as group_stats,
    leave_one_out as leave_one_out,
    optimal_baseline as optimal_baseline,
    process_group_normalized as process_group_normalized,
)
from rlhf_pg.advantages.per_token import (
    discounted_returns as discounted_returns,
    gae as gae,
    length_adaptive_lam as length_adaptive_lam,
    n_step as n_step,
)
