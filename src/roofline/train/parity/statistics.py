"""Statistics of correlated series for `roofline parity`: means, trends, steps and jumps.

Student's t is computed here, without scipy. Random permutations come from a fixed key, so that a verdict is the same on
every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

MOST_WAVES = 40  # cosine coefficients of a mean's error
BATCHES, FEWEST_BATCHES = 20, 8  # of a test for changes
PERMUTATIONS = 1999
WINDOW = 20  # steps on either side of a hand-over
OUTLIER = 12.0  # times the scatter of its neighbours that a single observation must be off
MOST_OUTLIERS = 100  # of the farthest observations that are looked at
LEG = 40  # least average steps of a leg; in shorter ones correlated noise looks like jumps


@dataclass(frozen=True)
class Mean:
    """A mean, its standard error with degrees of freedom, and its 90 % interval.

    The interval is inside (-m, m) exactly if two one-sided tests at 5 % accept m (TOST, Schuirmann 1987).
    """

    mean: float
    error: float
    freedom: int
    low: float
    high: float

    def inside(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin

    def outside(self, margin: float) -> bool:
        return self.low > margin or self.high < -margin


@dataclass(frozen=True)
class Change:
    """Whether a series has a trend or a step.

    p_trend, p_step: the share of shuffles of batch means with a trend or a step as strong. slope: per observation. at:
    observations before the strongest step; before, after: the means on its sides. stepped: a step fits better than a
    line. batch: observations in a batch.
    """

    p_trend: float
    p_step: float
    slope: float
    at: int
    before: float
    after: float
    stepped: bool
    batch: int


@dataclass(frozen=True)
class Jump:
    """The mean of the WINDOW observations behind `at` minus the mean of those before, with its error.

    p: the probability of so large a jump by chance, corrected for the number of jumps tested (Bonferroni).
    """

    at: int
    jump: float
    error: float
    p: float


@dataclass(frozen=True)
class Spike:
    """A single observation that is far from its neighbours.

    at: its index. size: its distance from the median of WINDOW observations on either side. scatter: of the noisier
    side about that median, as a standard deviation.
    """

    at: int
    size: float
    scatter: float


def spike(x: Series, least: float) -> Spike | None:
    """The farthest single observation that is off by more than `least` and OUTLIER times its neighbours' scatter.

    Neighbours without any scatter, as of bit-equal runs, leave `least` alone to decide.
    """
    far = np.abs(x - np.median(x))
    farthest: Spike | None = None
    for at in np.argsort(far)[::-1][:MOST_OUTLIERS].tolist():
        sides = [x[max(0, at - WINDOW) : at], x[at + 1 : at + 1 + WINDOW]]
        middle = float(np.median(np.concatenate(sides)))
        # Of the noisier side: runs that were equal bit by bit up to here scatter from here on.
        scatter = max(1.4826 * float(np.median(np.abs(side - middle))) for side in sides if len(side))
        each = Spike(at, float(x[at]) - middle, scatter)
        is_far = abs(each.size) > max(least, OUTLIER * each.scatter)
        if is_far and (farthest is None or abs(each.size) > abs(farthest.size)):
            farthest = each
    return farthest


def correlation_time(x: Series) -> float:
    """The number of observations that are worth one independent one (Sokal 1997, with his window of five times it)."""
    n = len(x)
    y = x - x.mean()
    total = float(y @ y)
    if total <= 0:
        return 1.0
    wide = np.fft.rfft(y, 1 << (2 * n - 1).bit_length())
    correlation = np.fft.irfft(wide * np.conj(wide))[:n] / total
    tau = 1.0
    for lag in range(1, n // 2):
        tau += 2 * float(correlation[lag])
        if lag >= 5 * tau:
            break
    tau = max(1.0, tau)
    return min(tau * (1 + 4 * tau / n), n / 4)  # corrects for subtracting the series' own mean


def mean(x: Series, least_error: float = 0.0) -> Mean:
    """The mean of a stationary series, with an error that accounts for autocorrelation.

    The variance at frequency zero is the mean square of the first cosine coefficients (equal-weighted cosine estimator,
    Lazarus, Lewis, Stock and Watson 2018), as many as the authors advise, or fewer for a long correlation.

    least_error: lower bound of the error, from repeated runs.
    """
    n = len(x)
    count = max(1, int(min(MOST_WAVES, 0.4 * n ** (2 / 3), n / (6 * correlation_time(x)))))
    waves = np.cos(np.pi * np.arange(1, count + 1)[:, None] * (np.arange(n) + 0.5) / n)
    error = max(math.sqrt(float(np.square(waves @ x).mean()) * 2) / n, least_error)
    reach = t_quantile(0.1, count) * error
    middle = float(x.mean())
    return Mean(middle, error, count, middle - reach, middle + reach)


def change(x: Series) -> Change | None:
    """Test for a trend and a step by permutation of batch means; None if the series is too short for its correlation.

    A batch is at least three correlation times long, measured without trend or step. The trend's strength is the
    covariance with time, the step's the greatest standardised cumulative sum (Page 1954); permutations as in Good 2005.
    """
    n = len(x)
    tau = correlation_time(_without_trend(x))
    tau *= 1 + 8 * tau / n  # the subtracted step was chosen to explain most
    batch = max(-(-n // BATCHES), math.ceil(3 * tau))
    count = n // batch
    if count < FEWEST_BATCHES:
        return None
    y = x[n - count * batch :].reshape(count, batch).mean(1)
    generator = np.random.Philox(key=np.frombuffer(b"roofline parity1", "<u8"))
    shuffled = y[np.argsort(generator.random_raw(PERMUTATIONS * count).reshape(-1, count), axis=1)]
    trend, step = _statistics(y[None])
    trends, steps = _statistics(shuffled)
    slack = 1e-9 * float(np.abs(y).max())
    at, stepped = _strongest(x)
    time = _centred_time(n)
    return Change(
        p_trend=(1 + int((trends >= trend - slack).sum())) / (1 + PERMUTATIONS),
        p_step=(1 + int((steps >= step - slack).sum())) / (1 + PERMUTATIONS),
        slope=float(time @ x / (time @ time)),
        at=at,
        before=float(x[:at].mean()),
        after=float(x[at:].mean()),
        stepped=stepped,
        batch=batch,
    )


def jumps(x: Series, places: Sequence[int]) -> list[Jump]:
    """The jump behind `place` observations, for each place.

    Places with less than WINDOW observations to the next are left out, and all if they are less than LEG apart on
    average. It is a t test on the scatter in two windows, widened by the series' correlation between places.
    """
    edges = [0, *places, len(x)]
    length = len(x) / (len(edges) - 1)
    residuals = x.copy()
    for begin, end in pairwise(edges):
        if end > begin:
            residuals[begin:end] -= x[begin:end].mean()
    tau = correlation_time(residuals)
    tau = min(tau * (1 + 4 * tau / length), length / 2)  # as in correlation_time: each part's mean was subtracted
    sides = zip(edges, places, edges[2:], strict=False)
    tested = [at for begin, at, end in sides if min(at - begin, end - at) >= WINDOW] if length >= LEG else []
    return [_jump(x, at, tau, len(tested)) for at in tested]


def _jump(x: Series, at: int, tau: float, tests: int) -> Jump:
    before, after = x[at - WINDOW : at], x[at : at + WINDOW]
    scatter = (before.var(ddof=1) + after.var(ddof=1)) / 2 / (1 - min(0.8, tau / WINDOW))
    error = math.sqrt(2 * float(scatter) * tau / WINDOW)
    jump = float(after.mean() - before.mean())
    if error == 0:
        return Jump(at, jump, error, 1.0 if jump == 0 else 0.0)
    p = t_tail(abs(jump) / error, max(1.0, 2 * WINDOW / tau - 2))
    return Jump(at, jump, error, min(1.0, p * tests))


def _statistics(y: Series) -> tuple[Series, Series]:
    """The strength of the trend, and of the strongest step, in each row of batch means [rows, batches]."""
    count = y.shape[1]
    y = y - y.mean(1, keepdims=True)
    trend = np.abs(y @ np.arange(count))
    cut = np.arange(2, count - 1)
    sums = np.cumsum(y, 1)[:, 1:-2]
    return trend, np.abs(sums / np.sqrt(cut * (count - cut) / count)).max(1)


def _centred_time(n: int) -> Series:
    """The numbers of n observations less their mean."""
    return np.arange(n, dtype=np.float64) - (n - 1) / 2


def _strongest(x: Series) -> tuple[int, bool]:
    """Observations before the step that explains most, and whether it explains more than a line."""
    n = len(x)
    y = x - x.mean()
    cut = np.arange(1, n)
    gain = np.square(np.cumsum(y)[:-1]) * n / (cut * (n - cut))
    edge = max(1, n // 50)  # near the ends a single outlier looks like a step
    at = edge + int(np.argmax(gain[edge - 1 : n - edge]))
    time = _centred_time(n)
    return at, float(gain[at - 1]) > float(np.square(time @ y) / (time @ time))


def _without_trend(x: Series) -> Series:
    """The series without its step or its line, whichever explains more."""
    at, stepped = _strongest(x)
    if stepped:
        return np.concatenate([x[:at] - x[:at].mean(), x[at:] - x[at:].mean()])
    time = _centred_time(len(x))
    return x - x.mean() - time * float(time @ x / (time @ time))


def t_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than `t`, on either side."""
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@cache
def t_quantile(p: float, freedom: float) -> float:
    """The t that Student's t exceeds on either side with probability p."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > p else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, as a continued fraction (Abramowitz and Stegun 26.5.8, Lentz)."""
    if not 0 < x < 1:
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d, value = 1.0, 1 / (1 - (a + b) * x / (a + 1)), 1 / (1 - (a + b) * x / (a + 1))
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            value *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return front * value
