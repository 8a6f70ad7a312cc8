"""Per-token policy and value losses, and the weights that sum them to one number.

A loss returns (per_token, metrics), each (B,T): what to minimise at every token, and numbers to
average over the mask for the log. It knows nothing of aggregation or of other processes: `loss =
(per_token * token_weights(...)).sum()`, where the denominator of the weights counts the whole
optimizer step on all ranks, so any split into micro-batches has the same gradient.

Throughout, rho_t = pi(y_t) / pi_old(y_t) for a token y_t that pi_old sampled, and sg stops the
gradient. Masked slots may hold anything, NaN included, and are 0 in the output.
"""

from rlhf_pg.losses.likelihood import positive_nll as positive_nll
from rlhf_pg.losses.off_policy import SAMPLER_CORRECTIONS as SAMPLER_CORRECTIONS
from rlhf_pg.losses.off_policy import sampler_weights as sampler_weights
from rlhf_pg.losses.policy import MAX_LOG_RATIO as MAX_LOG_RATIO
from rlhf_pg.losses.policy import POLICY_LOSSES as POLICY_LOSSES
from rlhf_pg.losses.policy import SAMPLING_LEVELS as SAMPLING_LEVELS
from rlhf_pg.losses.policy import Loss as Loss
from rlhf_pg.losses.policy import cispo as cispo
from rlhf_pg.losses.policy import clipped_surrogate as clipped_surrogate
from rlhf_pg.losses.policy import kl_penalty as kl_penalty
from rlhf_pg.losses.policy import sapo as sapo
from rlhf_pg.losses.policy import surrogate as surrogate
from rlhf_pg.losses.policy import vanilla as vanilla
from rlhf_pg.losses.value import value_loss as value_loss
from rlhf_pg.losses.weights import AGGREGATIONS as AGGREGATIONS
from rlhf_pg.losses.weights import token_weights as token_weights
from rlhf_pg.losses.weights import weight_count as weight_count
