"""Controllers: numbers that follow a measurement of the run, one update at a time.

Each is a dataclass of plain floats, so that `vars(controller)` is its state in a checkpoint. A
measurement must be one of all processes together, or they part. One that is NaN changes nothing.
"""

from dataclasses import dataclass


@dataclass
class AdaptiveKLController:
    """Moves the KL coefficient in proportion to the error (Ziegler et al. 2019, section 2.2).

        e = clip(kl / target - 1, -0.2, 0.2),  coef <- coef * (1 + e * num_samples / horizon)

    `kl` is the mean over completions of the summed k1, in nats; `horizon` is counted in
    completions.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, num_samples: int) -> None:
        if kl != kl:
            return  # a NaN would stay in the coefficient, and in every checkpoint after it
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon


@dataclass
class PenaltyKLController:
    """The adaptive penalty of PPO (Schulman et al. 2017, section 4).

    coef <- coef / 2 if kl < target / 1.5;  coef <- 2 * coef if kl > 1.5 * target

    PPO's `kl` is that after the updates which the coefficient has held back.
    """

    coef: float
    target: float

    def update(self, kl: float) -> None:
        if kl < self.target / 1.5:
            self.coef /= 2
        elif kl > self.target * 1.5:
            self.coef *= 2


@dataclass
class EntropyController:
    """Keeps the policy's entropy at a target by the coefficient of its bonus (Skywork-OR1, 2025).

        coef <- min(coef + delta, maximum)  if entropy < target
        coef <- max(coef - delta, minimum)  if entropy > target

    `entropy` is the mean per action token, in nats, of a whole step.

    Elsewhere: the paper, and TRL's GRPO after it (`use_adaptive_entropy`), leave the bonus out of a
    step, whatever the coefficient, while the entropy is above the target; TRL raises the
    coefficient at the target too. Here it applies as it is: `minimum` 0 turns it off.
    """

    coef: float
    target: float
    delta: float
    minimum: float
    maximum: float

    def update(self, entropy: float) -> None:
        step = self.delta * ((entropy < self.target) - (entropy > self.target))
        self.coef = min(max(self.coef + step, self.minimum), self.maximum)


@dataclass
class KLAdaptiveRate:
    """Scales the learning rate to move the policy by about `target` (KLAdaptiveLR of skrl).

        coef <- max(coef / 1.5, minimum)  if kl > 2 target
        coef <- min(coef * 1.5, maximum)  if kl < target / 2

    `kl` estimates KL(pi_old || pi) per token, in nats, after the last update of a step: the mean of
    rho - 1 - log rho. `coef` multiplies whatever rate the schedule gives.

    Elsewhere: skrl bounds the rate itself, by default to [1e-6, 1e-2], far above what a language
    model bears.
    """

    target: float
    minimum: float = 0.1
    maximum: float = 10.0
    coef: float = 1.0

    def update(self, kl: float) -> None:
        if kl > 2 * self.target:
            self.coef = max(self.coef / 1.5, self.minimum)
        elif kl < self.target / 2:
            self.coef = min(self.coef * 1.5, self.maximum)
