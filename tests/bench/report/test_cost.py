"""Money and energy: the arithmetic, prices by machine, and what is refused."""

import msgspec
import pytest

from roofline.bench.report import cost
from roofline.bench.report.cost import Prices, check_date, offered, parse_prices, token_cost
from roofline.bench.report.gather import of_points
from roofline.bench.results.point import Energy
from roofline.common.errors import ConfigError
from tests.bench.report import made

PRICES = Prices(usd_per_hour={"": 3.6}, source="a list", date="2026-11-01")


def test_money_is_shared_among_tokens() -> None:
    """4 requests a second, each with 400 tokens of a prompt and 60 of an answer, for 0.001 USD a second."""
    made_of = token_cost(made.point(4), PRICES)
    assert made_of is not None
    assert made_of.blended == pytest.approx(0.001 / (4 * 460) * 1e6)
    assert made_of.answers_pay_all == pytest.approx(0.001 / 240 * 1e6)
    assert made_of.prompt == pytest.approx(0.001 / (4 * (400 + 4 * 60)) * 1e6)
    assert made_of.answer == pytest.approx(4 * made_of.prompt)
    assert made_of.joules is None
    total = made_of.prompt * 1600 + made_of.answer * 240
    assert total / 1e6 == pytest.approx(0.001), "both prices together pay for the second"


def test_electricity_comes_on_top_where_a_counter_was_read() -> None:
    energy = Energy(source="rapl", joules=1500, seconds=15, idle_joules=500, joules_per_token=2.5)
    point = msgspec.structs.replace(made.point(4), energy=energy)
    prices = priced(usd_per_kwh=0.36, pue=1.5)
    with_energy, without = token_cost(point, prices), token_cost(made.point(4), prices)
    assert with_energy is not None
    assert without is not None
    more = (100 * 1.5 * 0.36 / 3.6e6) / (4 * 460) * 1e6  # 100 W
    assert with_energy.blended - without.blended == pytest.approx(more)
    assert with_energy.joules == 2.5
    (section,) = cost.sections(of_points([point]), prices)
    assert "Electricity comes on top where a counter was read: 0.36 USD a kWh, times a PUE of 1.5." in section.text
    plain = token_cost(point, priced(usd_per_kwh=0.36))
    assert plain is not None
    assert plain.blended - without.blended == pytest.approx(more / 1.5), "one joule of the building for each"


def priced(**changes: float) -> Prices:
    return Prices(usd_per_hour={"": 3.6}, source="a list", date="2026-11-01", **changes)  # type: ignore[arg-type]


def test_prices_are_of_machines() -> None:
    prices = Prices(usd_per_hour=parse_prices(["2", "cpu=3", "Another CPU=5"]), source="s", date="2026-11-01")
    assert [prices.of(place) for place in ("A CPU", "Another CPU", "MI300X")] == [3, 5, 2]
    assert Prices(usd_per_hour={"MI300X": 2}, source="s", date="d").of("A CPU") is None


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "MI300X=", "1e3", "nan"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no price: write USD an hour, such as 2\.5"):
        parse_prices([text])


def test_a_price_has_a_day() -> None:
    check_date("2026-11-26")
    with pytest.raises(ConfigError, match=r"price_date='26\.11\.2026' is no day: write it as 2026-11-26"):
        check_date("26.11.2026")


def test_offered_load() -> None:
    assert offered(made.point(4, rate=3.0)) == 3.0
    assert offered(made.point(4)) == pytest.approx(4.0), "of a closed loop what it reached"


def test_curves_over_load() -> None:
    energy = Energy(source="rapl", joules=1500, seconds=15, idle_joules=500, joules_per_token=2.5)
    points = [msgspec.structs.replace(point, energy=energy) for point in made.curve()]
    (section,) = cost.sections(of_points(points), PRICES)
    money, joules = section.charts
    assert (money.x.log, money.y.log, joules.y.zero) == (True, True, True)
    assert [mark.x for mark in money.series[0].marks] == pytest.approx([1.6, 8 / 3, 4, 16 / 3, 6.4, 64 / 9])
    prices = [mark.y for mark in money.series[0].marks]
    assert prices == sorted(prices, reverse=True), "cheaper with more load"
    interval = money.series[0].marks[2].y_interval
    assert interval == pytest.approx((prices[2] / 1.03, prices[2] / 0.97))
    assert [mark.y for mark in joules.series[0].marks] == [2.5] * 6
    assert "any machine 3.6 USD an hour, of 2026-11-01, from a list" in section.text
    (without,) = cost.sections(of_points(made.curve()), PRICES)
    assert len(without.charts) == 1
    assert "no energy is told" in without.text
    assert cost.sections(of_points(made.curve()), Prices(usd_per_hour={"MI300X": 2}, source="s", date="d")) == []
