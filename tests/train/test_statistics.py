"""The statistics of parity beside naive versions of them: sums written out, closed forms, tables of limits."""

import math

import numpy as np
import pytest

from roofline.train.parity.statistics import Mean, change, correlation_time, jumps, mean, spike, t_quantile, t_tail


def series(n: int, correlation: float, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(n)
    for i in range(1, n):
        x[i] += correlation * x[i - 1]
    return x


SERIES = {
    "white": series(50, 0.0),
    "correlated": series(200, 0.7),
    "alternating": series(128, -0.9),
    "walk": series(300, 1.0),  # its correlation time is all that n observations can show
    "long": series(2000, 0.1),
    "step": series(240, 0.3) + 3 * (np.arange(240) >= 70),
    "early step": series(120, 0.0) + 5 * (np.arange(120) >= 1),
    "trend": series(240, 0.3) + np.arange(240) / 40,
    "correlated step": series(400, 0.8) + 8 * (np.arange(400) >= 150),
    "correlated trend": series(400, 0.8, 1) + np.arange(400) / 40,
}


def naive_time(x: np.ndarray) -> float:
    n, y = len(x), [float(value) for value in x - x.mean()]
    total, tau = sum(value * value for value in y), 1.0
    for lag in range(1, n // 2):
        tau += 2 * sum(y[i] * y[i + lag] for i in range(n - lag)) / total
        if lag >= 5 * tau:
            break
    tau = max(1.0, tau)
    return min(tau + 4 * tau * tau / n, n / 4)


@pytest.mark.parametrize("name", SERIES)
def test_the_correlation_time_is_the_sum_of_correlations(name: str) -> None:
    x = SERIES[name]
    assert correlation_time(x) == pytest.approx(naive_time(x), rel=1e-9)
    assert correlation_time(100 + 7 * x) == pytest.approx(naive_time(x), rel=1e-6)


@pytest.mark.parametrize("name", SERIES)
def test_the_error_of_a_mean_is_that_of_its_slow_waves(name: str) -> None:
    x = SERIES[name]
    n = len(x)
    count = max(1, int(min(40, 0.4 * n ** (2 / 3), n / (6 * naive_time(x)))))
    waves = [
        math.sqrt(2 / n) * sum(value * math.cos(math.pi * k * (i + 0.5) / n) for i, value in enumerate(x))
        for k in range(1, count + 1)
    ]
    error = math.sqrt(sum(wave * wave for wave in waves) / count / n)
    found = mean(x)
    assert found.freedom == count
    assert found.mean == pytest.approx(x.mean())
    assert found.error == pytest.approx(error, rel=1e-9)
    reach = t_quantile(0.1, count) * error
    assert (found.low, found.high) == pytest.approx((x.mean() - reach, x.mean() + reach))
    wide = mean(x, 2 * error)
    assert wide.error == 2 * error
    assert mean(x, error / 2) == found


def test_the_number_of_waves_has_three_limits() -> None:
    assert mean(SERIES["long"]).freedom == 40
    assert mean(SERIES["alternating"]).freedom == int(0.4 * 128 ** (2 / 3))
    assert mean(SERIES["walk"]).freedom == 1


def test_an_interval_is_inside_or_outside_of_a_margin_but_not_on_it() -> None:
    def of(low: float, high: float) -> Mean:
        return Mean((low + high) / 2, 1.0, 3, low, high)

    assert of(-0.9, 0.9).inside(1.0)
    for low, high in ((-1.0, 0.5), (-0.5, 1.0), (-1.1, 0.0), (0.0, 1.1)):
        assert not of(low, high).inside(1.0)
        assert not of(low, high).outside(1.0)
    assert of(1.1, 2.0).outside(1.0)
    assert of(-2.0, -1.1).outside(1.0)
    for low, high in ((1.0, 2.0), (-2.0, -1.0)):
        assert not of(low, high).outside(1.0)


PLACES = (0.0, 0.01, 0.5, 1.0, 2.0, 3.7, 12.0, 60.0)


def test_student_s_t_has_its_closed_forms() -> None:
    for t in PLACES:
        root = t / math.sqrt(3)
        closed = {
            1: 1 - 2 / math.pi * math.atan(t),
            2: 1 - t / math.sqrt(2 + t * t),
            3: 1 - 2 / math.pi * (root / (1 + root * root) + math.atan(root)),
            4: 1 - t / math.sqrt(4 + t * t) * (1 + 2 / (4 + t * t)),
        }
        for freedom, expected in closed.items():
            assert t_tail(t, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("freedom", [1.5, 2.5, 7.3, 36.0])
def test_student_s_t_is_the_integral_of_its_density(freedom: float) -> None:
    """Simpson's rule between two places."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for low, high in ((0.0, 0.7), (0.7, 2.5), (2.5, 6.0)):
        at = np.linspace(low, high, 2001)
        density = scale * (1 + at * at / freedom) ** (-(freedom + 1) / 2)
        between = (
            (density[0] + density[-1] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum()) * (at[1] - at[0]) / 3
        )
        assert t_tail(low, freedom) - t_tail(high, freedom) == pytest.approx(2 * between, rel=1e-9)


def test_nothing_is_farther_than_infinity() -> None:
    for freedom in (1, 2.5, 40):
        assert (t_tail(math.inf, freedom), t_tail(0.0, freedom)) == (0.0, 1.0)


def test_quantiles_and_tails_are_inverse() -> None:
    for p in (0.5, 0.1, 0.01, 1e-6):
        for freedom in (1, 2, 5, 40):
            assert t_tail(t_quantile(p, freedom), freedom) == pytest.approx(p, rel=1e-9)


def naive_strongest(x: np.ndarray) -> tuple[int, bool]:
    """By the squares that remain."""
    n = len(x)
    edge = max(1, n // 50)

    def rest(part: np.ndarray) -> float:
        return float(np.square(part - part.mean()).sum())

    remains = {at: rest(x[:at]) + rest(x[at:]) for at in range(edge, n - edge + 1)}
    at = min(remains, key=lambda cut: remains[cut])
    line = np.polyval(np.polyfit(np.arange(n), x, 1), np.arange(n))
    return at, remains[at] < float(np.square(x - line).sum())


def naive_without_trend(x: np.ndarray) -> np.ndarray:
    at, stepped = naive_strongest(x)
    if stepped:
        return np.concatenate([x[:at] - x[:at].mean(), x[at:] - x[at:].mean()])
    return x - np.polyval(np.polyfit(np.arange(len(x)), x, 1), np.arange(len(x)))


def naive_strengths(y: list[float]) -> tuple[float, float]:
    count = len(y)
    y = [value - sum(y) / count for value in y]
    trend = abs(sum(value * (i - (count - 1) / 2) for i, value in enumerate(y)))
    steps = [abs(sum(y[:cut])) / math.sqrt(cut * (count - cut) / count) for cut in range(2, count - 1)]
    return trend, max(steps)


@pytest.mark.parametrize("name", [name for name in SERIES if name != "walk"])
def test_a_change_is_compared_with_shuffled_batches(name: str) -> None:
    x = SERIES[name]
    n = len(x)
    tau = naive_time(naive_without_trend(x))
    tau *= 1 + 8 * tau / n
    batch = max(math.ceil(n / 20), math.ceil(3 * tau))
    found, count = change(x), n // batch
    if count < 8:
        assert found is None
        return
    assert found is not None
    assert found.batch == batch
    assert (found.at, found.stepped) == naive_strongest(x)
    assert (found.before, found.after) == pytest.approx((x[: found.at].mean(), x[found.at :].mean()))
    assert found.slope == pytest.approx(float(np.polyfit(np.arange(n), x, 1)[0]))
    y = [float(part.mean()) for part in np.split(x[n - count * batch :], count)]
    raw = np.random.Philox(key=np.frombuffer(b"roofline parity1", "<u8")).random_raw(1999 * count)
    orders = np.argsort(raw.reshape(1999, count), axis=1).tolist()
    trend, step = naive_strengths(y)
    shuffled = [naive_strengths([y[i] for i in order]) for order in orders]
    slack = 1e-9 * max(map(abs, y))
    assert found.p_trend == (1 + sum(each >= trend - slack for each, _ in shuffled)) / 2000
    assert found.p_step == (1 + sum(each >= step - slack for _, each in shuffled)) / 2000


def test_a_change_needs_eight_batches() -> None:
    assert change(SERIES["walk"]) is None
    lengths = [n for n in range(20, 80) if change(series(n, 0.0, 3)) is not None]
    for n in range(20, 80):
        tau = naive_time(naive_without_trend(series(n, 0.0, 3)))
        batch = max(math.ceil(n / 20), math.ceil(3 * tau * (1 + 8 * tau / n)))
        assert (n in lengths) == (n // batch >= 8)
    assert 0 < len(lengths) < 60


@pytest.mark.parametrize(("n", "edge"), [(40, 1), (98, 1), (100, 2), (149, 2), (150, 3)])
def test_an_outlier_near_the_ends_is_no_step(n: int, edge: int) -> None:
    for place, at in ((0, edge), (n - 1, n - edge)):
        x = series(n, 0.0)
        x[place] = 100.0
        found = change(x)
        assert found is not None
        assert found.at == at


def test_a_constant_series_has_changed_nowhere() -> None:
    found = change(np.full(100, 3.0))
    assert found is not None
    assert (found.p_trend, found.p_step, found.slope, found.batch, found.stepped) == (1.0, 1.0, 0.0, 5, False)


@pytest.mark.parametrize("name", ["correlated", "step", "trend", "alternating", "walk"])
def test_a_jump_is_judged_by_the_scatter_on_its_sides(name: str) -> None:
    x = SERIES[name]
    places = [len(x) // 4, len(x) // 2]
    rest = x.copy()
    for begin, end in ((0, places[0]), (places[0], places[1]), (places[1], len(x))):
        rest[begin:end] -= rest[begin:end].mean()
    tau, length = naive_time(rest), len(x) / 3
    tau = min(tau * (1 + 4 * tau / length), length / 2)
    found = jumps(x, places)
    assert [jump.at for jump in found] == places
    for jump in found:
        before, after = x[jump.at - 20 : jump.at], x[jump.at : jump.at + 20]
        pooled = (np.var(before, ddof=1) + np.var(after, ddof=1)) / 2 / (1 - min(0.8, tau / 20))
        error = math.sqrt(2 * pooled * tau / 20)
        assert jump.jump == pytest.approx(after.mean() - before.mean())
        assert jump.error == pytest.approx(error, rel=1e-6)
        p = 2 * t_tail(abs(jump.jump) / error, max(1.0, 40 / tau - 2))  # of two tests
        assert jump.p == pytest.approx(min(1.0, p), rel=1e-4)


def test_jumps_need_room_on_both_sides() -> None:
    x = series(160, 0.0)
    assert [jump.at for jump in jumps(x, [20])] == [20]
    assert jumps(x, [19]) == []
    assert [jump.at for jump in jumps(x, [140])] == [140]
    assert jumps(x, [141]) == []
    assert [jump.at for jump in jumps(x, [60, 80])] == [60, 80]
    assert jumps(x, [60, 79]) == []
    assert [jump.at for jump in jumps(x, [30, 60, 90])] == [30, 60, 90]  # 40 steps a leg on average
    assert jumps(x[:159], [30, 60, 90]) == []
    assert jumps(x, []) == []
    assert [jump.at for jump in jumps(x, [0, 80])] == [80]  # taken over before the first step


def test_a_jump_without_scatter_is_certain() -> None:
    flat = np.zeros(100)
    assert [(jump.jump, jump.error, jump.p) for jump in jumps(flat, [50])] == [(0.0, 0.0, 1.0)]
    flat[50:] = 2
    assert [(jump.jump, jump.error, jump.p) for jump in jumps(flat, [50])] == [(2.0, 0.0, 0.0)]


def test_a_spike_is_farther_than_twelve_times_the_scatter_and_than_the_least() -> None:
    scatter = 1.4826
    for sign in (1.0, -1.0):
        for at in (0, 19, 50, 99):
            x = np.where(np.arange(100) % 2, 1.0, -1.0)
            for size, is_far in ((12 * scatter + 1.01, True), (12 * scatter - 1.01, False)):
                x[at] = sign * size  # the median of the neighbours is from -1 to 1
                found = spike(x, 0.5)
                assert (found is not None) == is_far
                if found is not None:
                    assert found.at == at
                    assert found.size == pytest.approx(sign * size, abs=1.0)
                    assert found.scatter == pytest.approx(scatter, rel=1.0)
    flat = np.zeros(60)
    flat[30] = 0.25
    assert spike(flat, 0.25) is None
    found = spike(flat, 0.24)
    assert found is not None
    assert (found.at, found.size, found.scatter) == (30, 0.25, 0.0)
    flat[10] = -0.5
    found = spike(flat, 0.2)
    assert found is not None
    assert found.at == 10, "the farthest"


@pytest.mark.parametrize("at", [0, 1, 19, 20, 21, 60, 98, 99, 118, 119])
def test_the_neighbours_of_a_spike_are_twenty_on_a_side(at: int) -> None:
    x = series(120, 0.0, at)
    x[at] = 90.0
    before, after = [float(x[i]) for i in range(at) if at - i <= 20], [float(v) for v in x[at + 1 :][:20]]
    middle = float(np.median(before + after))
    scatter = max(1.4826 * float(np.median(np.abs(np.array(side) - middle))) for side in (before, after) if side)
    found = spike(x, 1.0)
    assert found is not None
    assert (found.at, found.size, found.scatter) == (at, pytest.approx(90 - middle), pytest.approx(scatter))
