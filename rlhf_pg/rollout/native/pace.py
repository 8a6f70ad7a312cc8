"""The measurement of what drafts save, by which they are used or left alone."""

import math

LEAST = 0.4  # probability of the last token of a draft, estimated
FADING = 0.95  # of what earlier passes tell about the next
SELDOM = 32  # passes between two looks at the way that was slower
LONGEST_NAP = 8  # rollouts
LONGEST_WAKE = 16  # rollouts


class Pace:
    """Measures rollouts and passes with and without drafts, and says which should have any.

    With many rows a pass is limited by its arithmetic, and with few by the number of its
    operations, so passes are compared with those of about as many rows. Drafts also let rows part,
    so that more passes have few of them, which only whole rollouts show: while these are slower
    with drafts than without, drafts rest for 1, 3, 7 and then 8 rollouts.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, bool], float] = {}  # by number of rows, with drafts or not
        self.gained: dict[tuple[int, bool], float] = {}
        self.passes: dict[int, int] = {}
        self.awake = False
        self.rollout = [0.0, 0]  # seconds and tokens of this one
        self.prices = {True: math.inf, False: math.inf}  # seconds for a token, awake and asleep
        self.nap = self.rest = 0  # rollouts: of the last nap, and until the other way is tried

    def begin(self) -> bool:
        """Begin a rollout, and return whether its rows are to be drafted."""
        seconds, tokens = self.rollout
        if tokens:
            self.prices[self.awake] = seconds / tokens
        self.rollout = [0.0, 0]
        if self.rest:
            self.rest -= 1
        elif self.awake:  # a plain rollout for comparison, or a nap
            pays = self.prices[True] < self.prices[False] < math.inf
            self.nap = 0 if pays else min(2 * self.nap + 1, LONGEST_NAP)
            self.awake, self.rest = False, max(self.nap - 1, 0)
        else:
            self.awake = True
            pays = self.nap == 0 and self.prices[False] < math.inf
            self.rest = LONGEST_WAKE - 1 if pays else 0
        return self.awake

    def tries(self, rows: int) -> bool:
        """Return whether the next pass over so many rows should have drafts.

        It is the way that took less time for a token, and now and then the other.
        """
        size = rows.bit_length()
        self.passes[size] = count = self.passes.get(size, -1) + 1
        plain, drafted = (self._price(size, way) for way in (False, True))
        return (drafted < plain) != (count % SELDOM == SELDOM - 1)

    def worth(self, rate: float) -> int:
        """Return the length of a draft of whose tokens a share of `rate` is right, one by one."""
        return int(math.log(LEAST) / math.log(rate)) if 0 < rate < 1 else 0

    def passed(self, rows: int, gained: int, drafts: bool, seconds: float) -> None:
        """Take note of a pass over so many rows, in which so many tokens were drawn."""
        self.rollout[0] += seconds
        self.rollout[1] += gained
        key = (rows.bit_length(), drafts)
        self.seconds[key] = FADING * self.seconds.get(key, 0.0) + seconds
        self.gained[key] = FADING * self.gained.get(key, 0.0) + gained

    def _price(self, size: int, drafts: bool) -> float:
        """Return seconds for a token; 0 for drafts that were never tried."""
        if (size, drafts) not in self.gained:
            return 0.0 if drafts else math.inf
        return self.seconds[size, drafts] / self.gained[size, drafts]
