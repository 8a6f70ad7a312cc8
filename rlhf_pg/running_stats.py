"""Running statistics over the steps of a run, as plain floats that a checkpoint can hold.

`vars(statistics)` is what to save, and `type(statistics)(**saved)` restores it.
"""

from dataclasses import dataclass

from torch import Tensor

from rlhf_pg.masking import float_dtype, widen

INF = float("inf")
ROUNDING = 1e-6  # a std below this share of the mean is rounding, at float32's 6e-8


@dataclass
class RunningMoments:
    """Count, mean and population variance of all numbers so far (Chan et al. 1979).

    Before the first number, the mean is 0 and the std 1.
    """

    count: float = 0.0
    mean: float = 0.0
    var: float = 1.0

    def update(self, count: float, mean: float, var: float) -> None:
        """Merge the moments of a batch into those of all numbers so far (Chan et al. 1979).

            d = mean_b - mean_a,   n = n_a + n_b
            mean = mean_a + d n_b / n,   n var = n_a var_a + n_b var_b + d^2 n_a n_b / n

        Args:
            count: size of the batch over all processes; with 0 nothing changes.
            mean, var: of the batch; `var` is the population variance.

        Raises:
            ValueError: an argument is not finite, or the count or variance is negative.
        """
        if count == 0:
            return
        if not (0 < count < INF and abs(mean) < INF and 0 <= var < INF):  # NaN fails, too
            raise ValueError(
                "RunningMoments.update takes a finite count, mean and variance, only the mean "
                f"below 0: got {count}, {mean} and {var}"
            )
        both = self.count + count
        delta = mean - self.mean
        share = count / both
        # The share of the first batch is 1: the mean 0 and variance 1 before it leave no trace.
        self.var = (1 - share) * self.var + share * var + delta**2 * share * (1 - share)
        self.mean += delta * share
        self.count = both

    @property
    def std(self) -> float:
        """The standard deviation so far, or 1 if nothing has varied.

        A constant is then shifted to 0 and never blown up.
        """
        std: float = self.var**0.5
        is_constant = std <= ROUNDING * abs(self.mean)
        return 1.0 if is_constant else std

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std, for `x` of any shape."""
        return ((widen(x) - self.mean) / self.std).to(float_dtype(x))

    def denormalize(self, x: Tensor) -> Tensor:
        """Return x std + mean, for `x` of any shape."""
        return (widen(x) * self.std + self.mean).to(float_dtype(x))


@dataclass
class MovingAverage:
    """An exponential moving average, corrected for its start at 0 (Adam; Kingma & Ba 2015).

        m <- decay m + (1 - decay) x,   value = m / (1 - decay^updates)

    Raises:
        ValueError: the decay is outside [0, 1).
    """

    decay: float = 0.9
    average: float = 0.0  # m, not corrected
    updates: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"MovingAverage: decay must be at least 0 and below 1: {self.decay}")

    @property
    def value(self) -> float:
        """The corrected average; 0 before any update."""
        if self.updates:
            return self.average / (1 - self.decay**self.updates)
        return 0.0

    def update(self, x: float) -> None:
        """Add the next number.

        Raises:
            ValueError: the number is not finite.
        """
        if not abs(x) < INF:
            raise ValueError(f"MovingAverage.update takes a finite number: got {x}")
        self.average = self.decay * self.average + (1 - self.decay) * x
        self.updates += 1
