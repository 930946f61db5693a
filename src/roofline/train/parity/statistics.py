"""The statistics of `parity`: means, trends and jumps of series whose neighbours are alike.

No scipy: Student's t is integrated here. What is drawn at random is drawn from a fixed key, so a verdict is the same on
every machine and every day.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

MOST_WAVES = 40
BATCHES, FEWEST_BATCHES = 20, 8
PERMUTATIONS = 1999
WINDOW = 20  # steps on either side of a hand-over
LEG = 40  # steps of a leg, below which correlated noise looks like jumps


@dataclass(frozen=True)
class Mean:
    """A mean, its standard error with that error's degrees of freedom, and the 90 % interval.

    An interval inside (-m, m) is what two one-sided tests at 5 % ask for (TOST, Schuirmann 1987).
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
    """Whether a series changes its level.

    p_trend, p_step: how often shuffled batch means show as strong a trend, or as strong a step; slope: a step of
    training; at: observations before the strongest step; before, after: the means on its sides; stepped: a step fits
    better than a line; batch: observations of a batch.
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
    """The difference of the means of the WINDOW observations behind `at` and of those before, its error, and the
    probability of so large a one without a cause, already for all jumps looked at together (Bonferroni)."""

    at: int
    jump: float
    error: float
    p: float


def correlation_time(x: Series) -> float:
    """Observations that together say as much as one independent one (Sokal 1997, with his window of five times it)."""
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
    return min(tau * (1 + 4 * tau / n), n / 4)  # the mean, taken from the same series, hides a part


def mean(x: Series, least_error: float = 0.0) -> Mean:
    """The mean of a stationary series with an error that its autocorrelation does not make too small.

    The variance at frequency zero is the mean square of the first cosine coefficients (equal-weighted cosine estimator,
    Lazarus, Lewis, Stock and Watson 2018), as many as they advise, or fewer where the correlation is long.

    least_error: the error is not below it (what repeated runs differ by).
    """
    n = len(x)
    count = int(min(MOST_WAVES, 0.4 * n ** (2 / 3), n / (6 * correlation_time(x))))
    count = max(1, count)
    waves = np.cos(np.pi * np.arange(1, count + 1)[:, None] * (np.arange(n) + 0.5) / n)
    found = math.sqrt(float(np.square(waves @ x).mean()) * 2) / n
    error = max(found, least_error)
    reach = t_quantile(0.1, count) * error
    middle = float(x.mean())
    return Mean(middle, error, count, middle - reach, middle + reach)


def change(x: Series) -> Change | None:
    """Trend and step by permutation of batch means; None where the series is too short for its correlation.

    A batch is three correlation times long at least, of the series without its trend or step. Trend: covariance with
    time; step: the greatest standardised cumulative sum (Page 1954; the test by permutation as in Good 2005).
    """
    n = len(x)
    tau = correlation_time(_flattened(x))
    tau *= 1 + 8 * tau / n  # the step was chosen to take away the most
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
    time = np.arange(n) - (n - 1) / 2
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
    """At each place, which stands behind `place` observations. Places with less than WINDOW to the next are left out,
    and all where they are less than LEG apart on average.

    A t test on the scatter inside the two windows, widened by the correlation of the series between the places.
    """
    edges = [0, *places, len(x)]
    length = len(x) / (len(edges) - 1)
    rest = x.copy()
    for begin, end in pairwise(edges):
        if end > begin:
            rest[begin:end] -= x[begin:end].mean()
    tau = correlation_time(rest)
    tau = min(tau * (1 + 4 * tau / length), length / 2)  # as in correlation_time: each part had its mean taken
    sides = zip(edges, places, edges[2:], strict=False)
    found = [at for begin, at, end in sides if min(at - begin, end - at) >= WINDOW] if length >= LEG else []
    return [_jump(x, at, tau, len(found)) for at in found]


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
    """Of rows of batch means [rows, batches]: the strength of the trend and of the strongest step."""
    count = y.shape[1]
    y = y - y.mean(1, keepdims=True)
    trend = np.abs(y @ (np.arange(count) - (count - 1) / 2))
    cut = np.arange(2, count - 1)
    sums = np.cumsum(y, 1)[:, 1:-2]
    return trend, np.abs(sums / np.sqrt(cut * (count - cut) / count)).max(1)


def _strongest(x: Series) -> tuple[int, bool]:
    """Observations before the step that explains most, and whether it explains more than a line."""
    n = len(x)
    y = x - x.mean()
    cut = np.arange(1, n)
    gain = np.square(np.cumsum(y)[:-1]) * n / (cut * (n - cut))
    edge = max(1, n // 50)  # a step next to the end is any outlier
    at = edge + int(np.argmax(gain[edge - 1 : n - edge]))
    time = np.arange(n) - (n - 1) / 2
    return at, float(gain[at - 1]) > float(np.square(time @ y) / (time @ time))


def _flattened(x: Series) -> Series:
    """Without its step or its line, whichever explains more: what is left is noise."""
    at, stepped = _strongest(x)
    if stepped:
        return np.concatenate([x[:at] - x[:at].mean(), x[at:] - x[at:].mean()])
    time = np.arange(len(x)) - (len(x) - 1) / 2
    return x - x.mean() - time * float(time @ x / (time @ time))


def t_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than `t`, on either side."""
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@cache
def t_quantile(p: float, freedom: float) -> float:
    """The t with that probability outside of it."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > p else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised one, by its continued fraction (Abramowitz and Stegun 26.5.8) with Lentz's method."""
    if not 0 < x < 1:
        return min(1.0, max(0.0, x))
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
