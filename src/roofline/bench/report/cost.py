"""What tokens cost in money and in energy, over the load that is offered. Prices are what the caller says they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, ReportSection, Series, Table
from roofline.bench.report.gather import Gathered
from roofline.bench.report.throughput import by_arrivals, traffic_name
from roofline.bench.results.point import Point
from roofline.common.errors import ConfigError

MEGA, SECONDS_OF_HOUR, JOULES_OF_KWH = 1e6, 3600.0, 3.6e6
HOURS_OF_YEAR = 8760.0


@dataclass(frozen=True, kw_only=True)
class Depreciation:
    """How the purchase of machines is spread over hours. years: until they are worth nothing, in equal parts;
    utilisation: the share of all hours in which they serve, which pay for the others too."""

    years: float
    utilisation: float

    def usd_per_hour(self, purchase: float) -> float:
        """Of an hour in which the machine serves."""
        return purchase / (self.years * HOURS_OF_YEAR * self.utilisation)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dated inputs.

    usd_per_hour: of rented machines, by a part of the machine's name, "" for any; of all its devices; purchase: of
    bought ones, USD once; depreciation: of these; source, date: of these prices; usd_per_kwh: of electricity that the
    hourly price does not have in it, times pue, None where it has; answer_weight: how many prompt tokens an answer
    token is charged as.
    """

    usd_per_hour: dict[str, float]
    source: str
    date: str
    usd_per_kwh: float | None = None
    pue: float = 1.0
    answer_weight: float = 4.0
    purchase: dict[str, float] = field(default_factory=dict)
    depreciation: Depreciation | None = None

    def of(self, place: str) -> "MachineCost | None":
        """What an hour of a machine costs, None where no price is for it: of several that fit, the longest name."""
        fits = [name for name in (*self.usd_per_hour, *self.purchase) if name.lower() in place.lower()]
        if not fits:
            return None
        name = max(fits, key=len)
        if name in self.usd_per_hour:
            return MachineCost(self.usd_per_hour[name], bought=False)
        assert self.depreciation is not None, "a purchase has years"
        return MachineCost(self.depreciation.usd_per_hour(self.purchase[name]), bought=True)


@dataclass(frozen=True)
class MachineCost:
    """usd_per_hour: rent or capital, without electricity."""

    usd_per_hour: float
    bought: bool


@dataclass(frozen=True)
class TokenCost:
    """USD of a million tokens: of prompts and answers alike, of prompts, of answers, of answers that pay for all.

    joules: of a token of an answer, idle subtracted, None where no counter was read; usd_per_hour: of the machine with
    its electricity; capital, energy: shares of that, None where it is rented, where no counter or no price of
    electricity is known.
    """

    blended: float
    prompt: float
    answer: float
    answers_pay_all: float
    joules: float | None
    usd_per_hour: float
    capital: float | None
    energy: float | None


def parse_prices(texts: Sequence[str], option: str = "price") -> dict[str, float]:
    """Of "2.5" (any machine) or "MI300X=2.5". option: its name. Raises ConfigError naming the text."""
    what, example = ("USD an hour", "2.5") if option == "price" else ("USD of the machine", "250000")
    prices: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or float(number) <= 0:
            raise ConfigError(
                f"{option}={text!r} is no price: write {what}, such as {example}, or MI300X={example} for one machine"
            )
        prices[name.strip()] = float(number)
    return prices


def check_date(date: str) -> None:
    """Raises ConfigError unless it is a day as 2026-11-26."""
    from datetime import date as day

    try:
        day.fromisoformat(date)
    except ValueError:
        raise ConfigError(f"price_date={date!r} is no day: write it as 2026-11-26") from None


def token_cost(point: Point, prices: Prices) -> TokenCost | None:
    """None where the point has no tokens a second, or its machine has no price."""
    machine, answers = prices.of(words.place(point)), words.metric(point, words.TOKENS)
    if machine is None or not answers or point.counts is None or not point.counts.answer_tokens:
        return None
    energy = _energy_per_hour(point, prices, machine)
    hourly = machine.usd_per_hour + (energy or 0.0)
    usd_per_s = hourly / SECONDS_OF_HOUR
    prompts = answers * point.counts.prompt_tokens / point.counts.answer_tokens
    unit = usd_per_s / (prompts + prices.answer_weight * answers) * MEGA
    return TokenCost(
        blended=usd_per_s / (prompts + answers) * MEGA,
        prompt=unit,
        answer=unit * prices.answer_weight,
        answers_pay_all=usd_per_s / answers * MEGA,
        joules=None if point.energy is None else point.energy.joules_per_token,
        usd_per_hour=hourly,
        capital=machine.usd_per_hour / hourly if machine.bought else None,
        energy=None if energy is None else energy / hourly,
    )


def _energy_per_hour(point: Point, prices: Prices, machine: MachineCost) -> float | None:
    """USD of the electricity of an hour in which the machine serves, and of one that was bought of the hours for each
    of these in which it idles. None without a counter or a price of electricity."""
    if prices.usd_per_kwh is None or point.energy is None:
        return None
    seconds = max(point.energy.seconds, 1e-9)
    watts = point.energy.joules / seconds
    if machine.bought and prices.depreciation is not None:
        watts += point.energy.idle_joules / seconds * (1 / prices.depreciation.utilisation - 1)
    return watts * prices.pue * SECONDS_OF_HOUR / JOULES_OF_KWH * prices.usd_per_kwh


def offered(point: Point) -> float | None:
    """Requests a second that were offered; of a closed loop, that it reached."""
    if point.load is None:
        return None
    if point.load.offered is not None:
        return point.load.offered
    return words.metric(point, words.REQUESTS) or point.load.achieved or None


def sections(gathered: Gathered, prices: Prices) -> list[ReportSection]:
    """For each traffic money over offered load, and energy where there are counters."""
    out = []
    for (preset, sha256), points in gathered.traffics().items():
        section = _section(gathered, points, prices)
        if section is not None:
            title = f"{traffic_name(preset, sha256)}: cost"
            out.append(ReportSection(title, section.text, section.charts, section.table))
    return out


def _section(gathered: Gathered, points: Sequence[Point], prices: Prices) -> ReportSection | None:
    money: list[Series] = []
    energy: list[Series] = []
    rows: list[tuple[str, ...]] = []
    for kind, own in gathered.curves(points).items():
        for name, part in by_arrivals(gathered.name(kind), own):
            priced = [
                (point, cost, load)
                for point in part
                if (cost := token_cost(point, prices)) is not None and (load := offered(point)) is not None
            ]
            look, dashed = gathered.kinds[kind], name != gathered.name(kind)
            marks = tuple(_money_mark(*cells) for cells in priced)
            joules = tuple(
                Mark(
                    x=load,
                    y=cost.joules,
                    trusted=words.trusted(point),
                    doubt=words.doubt(point),
                    note=words.load_name(point),
                )
                for point, cost, load in priced
                if cost.joules is not None
            )
            money += [Series(name=name, marks=marks, look=look, dashed=dashed)] if marks else []
            energy += [Series(name=name, marks=joules, look=look, dashed=dashed)] if joules else []
            rows += [_row(name, *cells) for cells in priced]
    if not rows:
        return None
    x = Axis(title="offered load, requests/s", log=True)
    charts = (
        Chart(title="money", x=x, y=Axis(title="USD a million tokens", log=True), series=tuple(money)),
        Chart(title="energy", x=x, y=Axis(title="J a token of answers", zero=True), series=tuple(energy)),
    )
    headings = (
        "system", "load", "requests/s", "USD/M blended", "USD/M prompt", "USD/M answer", "USD/M answers pay all",
        "J/token", "USD/hour", "of it capital", "of it energy",
    )  # fmt: skip
    return ReportSection(
        "cost", _text(prices, bool(energy)), tuple(c for c in charts if not c.empty), Table(headings, tuple(rows))
    )


def _money_mark(point: Point, cost: TokenCost, load: float) -> Mark:
    around, value = words.interval(point, words.TOKENS), words.metric(point, words.TOKENS) or 1.0
    interval = None if around is None else (cost.blended * value / around[1], cost.blended * value / around[0])
    note = f"{words.load_name(point)}: {words.digits(cost.blended)} USD a million tokens"
    return Mark(
        x=load, y=cost.blended, y_interval=interval, note=note, trusted=words.trusted(point), doubt=words.doubt(point)
    )


def _row(name: str, point: Point, cost: TokenCost, load: float) -> tuple[str, ...]:
    figures = (load, cost.blended, cost.prompt, cost.answer, cost.answers_pay_all, cost.joules, cost.usd_per_hour)
    shares = words.percent(cost.capital), words.percent(cost.energy)
    return name, words.load_name(point), *map(words.digits, figures), *shares


def _text(prices: Prices, energy: bool) -> str:
    prices_text = [f"{name or 'any machine'} {usd:g} USD an hour" for name, usd in prices.usd_per_hour.items()]
    if prices.depreciation is not None:
        prices_text += [_purchase_text(name, usd, prices.depreciation) for name, usd in prices.purchase.items()]
    text = (
        f"Prices: {', '.join(prices_text)}, of {prices.date}, from {prices.source}. A machine costs the same when it "
        "idles, so a token is dear under low load. "
        f"An answer token is charged as {prices.answer_weight:g} prompt tokens."
    )
    if prices.usd_per_kwh is not None:
        electricity = f"{prices.usd_per_kwh:g} USD a kWh, times a PUE of {prices.pue:g}"
        text += f" Electricity comes on top where a counter was read: {electricity}."
    if prices.purchase:
        text += (
            " Of a machine that was bought, the electricity of its idle hours is paid for too; what no counter sees, "
            "such as fans, is in no figure, and where there is no counter the cost is capital alone."
        )
    return text + ("" if energy else " No point has an energy counter, so no energy is told.")


def _purchase_text(name: str, usd: float, depreciation: Depreciation) -> str:
    hourly = words.digits(depreciation.usd_per_hour(usd))
    return (
        f"{name or 'any machine'} {usd:,.0f} USD once, over {depreciation.years:g} years, in use for "
        f"{depreciation.utilisation:.0%} of the hours: {hourly} USD an hour of use"
    )
