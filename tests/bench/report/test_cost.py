"""Money and energy: the arithmetic, prices by machine, and what is refused."""

from dataclasses import replace

import msgspec
import pytest

from roofline.bench.report import cost
from roofline.bench.report.cost import Depreciation, MachineCost, Prices, check_date, offered, parse_prices, token_cost
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


BOUGHT = Prices(
    usd_per_hour={},
    source="an invoice",
    date="2026-11-01",
    usd_per_kwh=0.25,
    pue=1.5,
    purchase={"": 147_825.0},
    depreciation=Depreciation(years=5, utilisation=0.5),
)
ENERGY = Energy(source="nvml", joules=75_000, seconds=15, idle_joules=15_000, joules_per_token=2.5)


def test_a_purchase_is_spread_over_the_hours_of_use() -> None:
    """147,825 USD over 5 years of 8,760 hours, half of them in use, are 6.75 USD for each of these 21,900 hours. 5 kW
    in use and 1 kW in as many idle hours, times a PUE of 1.5, are 9 kWh, or 2.25 USD: 9 USD an hour."""
    cost_of = token_cost(msgspec.structs.replace(made.point(4), energy=ENERGY), BOUGHT)
    assert cost_of is not None
    assert cost_of.usd_per_hour == pytest.approx(9)
    assert (cost_of.capital, cost_of.energy) == (pytest.approx(0.75), pytest.approx(0.25))
    assert cost_of.blended == pytest.approx(9 / 3600 / 1840 * 1e6), "1,840 tokens a second"
    assert cost_of.answers_pay_all == pytest.approx(10.41667, rel=1e-5)
    always = msgspec.structs.replace(made.point(4), energy=ENERGY)
    used = token_cost(always, replace(BOUGHT, depreciation=Depreciation(years=5, utilisation=1)))
    assert used is not None
    assert used.usd_per_hour == pytest.approx(3.375 + 7.5 * 0.25), "no idle hours"


def test_without_a_counter_the_cost_is_capital_alone() -> None:
    cost_of = token_cost(made.point(4), BOUGHT)
    assert cost_of is not None
    assert (cost_of.usd_per_hour, cost_of.capital, cost_of.energy) == (pytest.approx(6.75), 1, None)


def test_of_a_rented_machine_only_the_share_of_energy_is_known() -> None:
    point = msgspec.structs.replace(made.point(4), energy=ENERGY)
    rented = token_cost(point, replace(BOUGHT, usd_per_hour={"": 3.6}, purchase={"MI300X": 147_825.0}))
    assert rented is not None
    assert rented.usd_per_hour == pytest.approx(3.6 + 5 * 1.5 * 0.25), "its owner pays for idle hours"
    assert (rented.capital, rented.energy) == (None, pytest.approx(1.875 / 5.475))
    plain = token_cost(point, PRICES)
    assert plain is not None
    assert (plain.usd_per_hour, plain.energy) == (3.6, None), "in the price of the hour"


def test_shares_of_capital_and_energy_are_told() -> None:
    (section,) = cost.sections(of_points([msgspec.structs.replace(made.point(4), energy=ENERGY)]), BOUGHT)
    assert section.table is not None
    assert section.table.headings[-3:] == ("USD/hour", "of it capital", "of it energy")
    assert section.table.rows[0][-3:] == ("9", "75%", "25%")
    assert "any machine 147,825 USD once, over 5 years, in use for 50% of the hours: 6.75 USD an hour" in section.text
    (rented,) = cost.sections(of_points([made.point(4)]), PRICES)
    assert rented.table is not None
    assert rented.table.rows[0][-3:] == ("3.6", "-", "-")
    assert "bought" not in rented.text


def test_prices_are_of_machines() -> None:
    prices = Prices(usd_per_hour=parse_prices(["2", "cpu=3", "Another CPU=5"]), source="s", date="2026-11-01")
    machines = [prices.of(place) for place in ("A CPU", "Another CPU", "MI300X")]
    assert machines == [MachineCost(3, bought=False), MachineCost(5, bought=False), MachineCost(2, bought=False)]
    assert Prices(usd_per_hour={"MI300X": 2}, source="s", date="d").of("A CPU") is None
    some = replace(BOUGHT, usd_per_hour={"": 2.0}, purchase=parse_prices(["MI300X=147825"], "price_capex"))
    assert some.of("A CPU") == MachineCost(2, bought=False)
    assert some.of("2 x MI300X") == MachineCost(147_825 / 21_900, bought=True)


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "MI300X=", "1e3", "nan"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no price: write USD an hour, such as 2\.5"):
        parse_prices([text])


def test_what_is_no_purchase_is_refused() -> None:
    with pytest.raises(ConfigError, match="price_capex='2k' is no price: write USD of the machine, such as 250000"):
        parse_prices(["2k"], "price_capex")


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
