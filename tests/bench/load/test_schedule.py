"""Planned moments: the rate is kept exactly, gaps have the distribution, and a seed gives the same ones."""

import numpy as np
import pytest

from roofline.bench.load.plan import Plan
from roofline.bench.load.schedule import planned_moments
from roofline.bench.traffic.traffic import TrafficRequest
from roofline.common.errors import ConfigError

REQUESTS = [TrafficRequest(prompt="", prompt_tokens=1, max_tokens=1, at_us=1000 * n * n) for n in range(400)]


def moments(**fields):
    plan = Plan(traffic="", events="", url="", model="", **fields)
    return np.array(planned_moments(plan, REQUESTS)) / 1e9


def test_constant():
    assert np.allclose(np.diff(moments(arrivals="constant", rate=8.0)), 0.125)


@pytest.mark.parametrize(("arrivals", "burstiness", "variation"), [("poisson", 9.0, 1.0), ("gamma", 0.25, 2.0)])
def test_random_gaps(arrivals, burstiness, variation):
    fields = {"arrivals": arrivals, "burstiness": burstiness, "rate": 8.0}
    planned = moments(**fields)
    assert planned[-1] == pytest.approx(400 / 8)
    gaps = np.diff(planned)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.2)
    assert (planned == moments(**fields)).all()
    assert (planned != moments(**fields, seed=1))[:-1].all()


def test_ramp():
    planned = moments(arrivals="ramp", rate_from=2.0, rate=10.0)
    rates = 1 / np.diff(planned)
    assert rates[0] == pytest.approx(2, rel=0.02)
    assert rates[-1] == pytest.approx(10, rel=0.02)
    middle = np.interp(planned[-1] / 2, planned[1:], rates)
    assert middle == pytest.approx(6, rel=0.02)  # evenly over time, not over requests
    assert np.allclose(np.diff(moments(arrivals="ramp", rate_from=5.0, rate=5.0)), 0.2)


def test_trace():
    assert moments(arrivals="trace", trace_speed=2.0)[3] == pytest.approx(0.0045)
    plan = Plan(traffic="", events="", url="", model="", arrivals="trace")
    with pytest.raises(ConfigError, match="does not say when"):
        planned_moments(plan, [TrafficRequest(prompt="", prompt_tokens=1, max_tokens=1)])
