"""Coefficients that move during a run, each by its controller in `rlhf_pg.control`."""

import math
from typing import Any

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.control import (
    AdaptiveKLController,
    EntropyController,
    KLAdaptiveRate,
    PenaltyKLController,
)

# What each goes by.
MEASURED = {
    "beta": "kl/completion",
    "old_kl_coef": "approx_kl/after",
    "entropy_coef": "entropy",
    "learning_rate_scale": "approx_kl/after",
}


class Coefficients:
    """beta, old_kl_coef and entropy_coef as they are now, and the scale of the learning rate.

    Attributes:
        controllers: of those that move, by name; what is in them goes to the checkpoint.
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
            self.controllers["entropy_coef"] = EntropyController(
                args.entropy_coef,
                args.entropy_target,
                args.entropy_coef_delta,
                args.entropy_coef_min,
                args.entropy_coef_max,
            )
        if args.kl_adaptive_lr is not None:
            self.controllers["learning_rate_scale"] = KLAdaptiveRate(
                args.kl_adaptive_lr, args.kl_adaptive_lr_min, args.kl_adaptive_lr_max
            )

    def __getitem__(self, key: str) -> float:
        """The coefficient with the name of this config key."""
        mover = self.controllers.get(key)
        return float(getattr(self.args, key) if mover is None else mover.coef)

    @property
    def learning_rate_scale(self) -> float:
        mover = self.controllers.get("learning_rate_scale")
        return 1.0 if mover is None else float(mover.coef)

    def metrics(self) -> dict[str, float]:
        """The entropy's and those that move, as the step that comes next will use them."""
        moving = {name: controller.coef for name, controller in self.controllers.items()}
        return {"entropy_coef": self["entropy_coef"]} | moving

    def update(self, metrics: dict[str, Any], num_completions: int) -> None:
        """Move them by the numbers of a step, which all processes share."""
        for name, controller in self.controllers.items():
            measured = metrics[MEASURED[name]]
            # A step without a token of the policy's own, or without an update.
            if not math.isfinite(measured):
                continue
            if isinstance(controller, AdaptiveKLController):
                controller.update(measured, num_completions)
            else:
                controller.update(measured)
