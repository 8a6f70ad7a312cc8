"""The price of a drafted token, measured, and how many of them are worth it."""

import math
from collections import deque

import numpy as np

REMEMBERED = 256  # passes
SELDOM = 32  # passes between two estimates of the price
WORTH = 0.02  # share of tokens from drafts below which they are left alone for a while
LONGEST_NAP = 8  # rollouts


class Pace:
    """Measures passes, and says how long a draft may be.

    A pass over N tokens whose rows have S earlier ones takes about a + b N + c S seconds. A row
    that is one token further ahead saves the seconds per token that sampling takes now, so the
    j-th token of a draft, which is right with probability r^j, is worth its b if

        r^j * (seconds per sampled token) > b
    """

    def __init__(self) -> None:
        self.passes: deque[tuple[int, int, int, float]] = deque(maxlen=REMEMBERED)
        self.price = 1.0  # b, in seconds per sampled token
        self.drawn = self.drafted = 0  # tokens of this rollout, and of these from drafts
        self.nap = self.asleep = 0  # rollouts

    def begin(self) -> bool:
        """Begin a rollout, and return whether its rows are to be drafted."""
        if self.drawn:
            pays = self.drafted > WORTH * self.drawn
            self.nap = 0 if pays else min(2 * self.nap + 1, LONGEST_NAP)
            self.asleep, self.drawn, self.drafted = self.nap, 0, 0
        elif self.asleep:
            self.asleep -= 1
        return not self.asleep

    def passed(self, tokens: int, earlier: int, gained: int, drafted: int, seconds: float) -> None:
        """Take note of a pass.

        Args:
            tokens: N, computed.
            earlier: S.
            gained: tokens that were sampled, `drafted` of them from drafts.
        """
        self.passes.append((tokens, earlier, gained, seconds))
        self.drawn += gained
        self.drafted += drafted
        if self.drawn // SELDOM != (self.drawn - gained) // SELDOM:
            self._estimate()

    def worth(self, rate: float) -> int:
        """Return the length of a draft each of whose tokens is right at this rate."""
        if rate <= self.price:
            return 0
        return int(math.log(self.price) / math.log(rate)) if rate < 1 else 10**6

    def _estimate(self) -> None:
        tokens, earlier, gained, seconds = np.array(self.passes).T
        # A pass that had to wait for another program says nothing about the others.
        seconds = np.minimum(seconds, 3 * np.median(seconds))
        work = np.stack([np.ones_like(tokens), tokens, earlier], axis=1)
        # As long as all passes are alike, half of the time is for their tokens.
        guess = np.array([seconds.mean() / 2, seconds.mean() / 2 / tokens.mean(), 0.0])
        weights = np.diag(np.sqrt((work**2).mean(axis=0)))
        rows, sums = np.concatenate([work, weights]), np.concatenate([seconds, weights @ guess])
        cost = np.linalg.lstsq(rows, sums, rcond=None)[0][1]
        self.price = float(np.clip(cost * gained.sum() / seconds.sum(), 0.01, 1.0))
