"""Coefficients that follow a measurement of the run, one update at a time.

Each controller is a dataclass of plain floats, so that `vars(controller)` is its state in a
checkpoint. Measurements must be reduced over all processes, or their coefficients would diverge. A
NaN changes nothing. The KL controllers are in `rlhf_pg.kl`.
"""

import math
from dataclasses import dataclass
from typing import Any

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.kl import AdaptiveKLController, KLAdaptiveRate, PenaltyKLController


@dataclass
class EntropyController:
    """Keep the policy's entropy at a target by adapting its bonus coefficient (Skywork-OR1, 2025).

        coef <- min(coef + delta, maximum)  if entropy < target
        coef <- max(coef - delta, minimum)  if entropy > target

    `entropy` is the mean per action token, in nats, of a whole step.

    Elsewhere: the paper, and TRL's GRPO after it (`use_adaptive_entropy`), leave the bonus out of a
    step, whatever the coefficient, while the entropy is above the target; TRL raises the
    coefficient at the target too. Here the bonus always applies; `minimum` 0 turns it off.
    """

    coef: float
    target: float
    delta: float
    minimum: float
    maximum: float

    def update(self, entropy: float) -> None:
        step = self.delta * ((entropy < self.target) - (entropy > self.target))
        self.coef = min(max(self.coef + step, self.minimum), self.maximum)


# The metric that each controller follows.
MEASURED = {
    "beta": "kl/completion",
    "old_kl_coef": "approx_kl/after",
    "entropy_coef": "entropy",
    "learning_rate_scale": "approx_kl/after",
}


class Controllers:
    """The current beta, old_kl_coef and entropy_coef, and the scale of the learning rate.

    `controllers` has one for each adaptive coefficient; checkpoints hold their state.
    """

    def __init__(self, args: PolicyGradientConfig) -> None:
        self.args = args
        self.controllers: dict[str, Any] = {}
        if args.kl_controller == "adaptive":
            horizon = float(args.kl_horizon)
            self.controllers["beta"] = AdaptiveKLController(args.beta, args.kl_target, horizon)
        elif args.kl_controller == "penalty":
            self.controllers["beta"] = PenaltyKLController(args.beta, args.kl_target)
        if args.old_kl_target is not None:
            old_kl = PenaltyKLController(args.old_kl_coef, args.old_kl_target)
            self.controllers["old_kl_coef"] = old_kl
        if args.entropy_target is not None:
            moves = args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
            entropy = EntropyController(args.entropy_coef, args.entropy_target, *moves)
            self.controllers["entropy_coef"] = entropy
        if args.kl_adaptive_lr is not None:
            self.controllers["learning_rate_scale"] = KLAdaptiveRate(args.kl_adaptive_lr)

    def __getitem__(self, key: str) -> float:
        """Return the coefficient of this name; an uncontrolled scale is 1."""
        mover = self.controllers.get(key)
        return float(getattr(self.args, key, 1.0) if mover is None else mover.coef)

    def metrics(self) -> dict[str, float]:
        """Return entropy_coef and the adaptive coefficients, as the next step will use them."""
        moving = {name: controller.coef for name, controller in self.controllers.items()}
        return {"entropy_coef": self["entropy_coef"]} | moving

    def update(self, metrics: dict[str, Any], num_completions: int) -> None:
        """Update the controllers by the metrics of a step, which all processes share."""
        for name, controller in self.controllers.items():
            measured = metrics[MEASURED[name]]
            # NaN for a step without policy tokens or without an update.
            if not math.isfinite(measured):
                continue
            if isinstance(controller, AdaptiveKLController):
                controller.update(measured, num_completions)
            else:
                controller.update(measured)
