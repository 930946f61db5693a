"""What tokens cost in money and in energy, over the load that is offered. Prices are what the caller says they are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, Section, Series, Table
from roofline.bench.report.gather import Gathered
from roofline.bench.report.throughput import by_arrivals, traffic_name
from roofline.bench.results.point import Point
from roofline.common.errors import ConfigError

MEGA, SECONDS_OF_HOUR, JOULES_OF_KWH = 1e6, 3600.0, 3.6e6


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dated inputs.

    usd_per_hour: by a part of the machine's name, "" for any; of all its devices; source, date: of these prices;
    usd_per_kwh: of electricity that the hourly price does not have in it, times pue, None where it has; answer_weight:
    how many prompt tokens an answer token is charged as.
    """

    usd_per_hour: dict[str, float]
    source: str
    date: str
    usd_per_kwh: float | None = None
    pue: float = 1.0
    answer_weight: float = 4.0

    def of(self, place: str) -> float | None:
        """The hourly price of a machine, None where none is for it: of several that fit, the longest name."""
        fits = [name for name in self.usd_per_hour if name.lower() in place.lower()]
        return self.usd_per_hour[max(fits, key=len)] if fits else None


@dataclass(frozen=True)
class TokenCost:
    """USD of a million tokens: of prompts and answers alike, of prompts, of answers, of answers that pay for all.
    joules: of a token of an answer, idle subtracted, None where no counter was read."""

    blended: float
    prompt: float
    answer: float
    answers_pay_all: float
    joules: float | None


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Of "2.5" (any machine) or "MI300X=2.5". Raises ConfigError naming the text."""
    prices = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or float(number) <= 0:
            raise ConfigError(
                f"price={text!r} is no price: write USD an hour, such as 2.5, or MI300X=2.5 for one machine"
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
    hourly, answers = prices.of(words.place(point)), words.metric(point, words.TOKENS)
    if hourly is None or not answers or point.counts is None or not point.counts.answer_tokens:
        return None
    joules = None if point.energy is None else point.energy.joules_per_token
    usd_per_s = hourly / SECONDS_OF_HOUR
    if prices.usd_per_kwh is not None and point.energy is not None:
        watts = point.energy.joules / max(point.energy.seconds, 1e-9)
        usd_per_s += watts * prices.pue / JOULES_OF_KWH * prices.usd_per_kwh
    prompts = answers * point.counts.prompt_tokens / point.counts.answer_tokens
    unit = usd_per_s / (prompts + prices.answer_weight * answers) * MEGA
    return TokenCost(
        blended=usd_per_s / (prompts + answers) * MEGA,
        prompt=unit,
        answer=unit * prices.answer_weight,
        answers_pay_all=usd_per_s / answers * MEGA,
        joules=joules,
    )


def offered(point: Point) -> float | None:
    """Requests a second that were offered; of a closed loop, that it reached."""
    if point.load is None:
        return None
    if point.load.offered is not None:
        return point.load.offered
    return words.metric(point, words.REQUESTS) or point.load.achieved or None


def sections(gathered: Gathered, prices: Prices) -> list[Section]:
    """For each traffic money over offered load, and energy where there are counters."""
    out = []
    for (preset, sha256), points in gathered.traffics().items():
        section = _section(gathered, points, prices)
        if section is not None:
            title = f"{traffic_name(preset, sha256)}: cost"
            out.append(Section(title, section.text, section.charts, section.table))
    return out


def _section(gathered: Gathered, points: Sequence[Point], prices: Prices) -> Section | None:
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
            marks = tuple(_money_mark(*each) for each in priced)
            joules = tuple(
                Mark(x=load, y=cost.joules, trusted=words.trusted(point), note=words.load_name(point))
                for point, cost, load in priced
                if cost.joules is not None
            )
            money += [Series(name=name, marks=marks, look=look, dashed=dashed)] if marks else []
            energy += [Series(name=name, marks=joules, look=look, dashed=dashed)] if joules else []
            rows += [_row(name, *each) for each in priced]
    if not rows:
        return None
    x = Axis(title="offered load, requests/s", log=True)
    charts = (
        Chart(title="money", x=x, y=Axis(title="USD a million tokens", log=True), series=tuple(money)),
        Chart(title="energy", x=x, y=Axis(title="J a token of answers", zero=True), series=tuple(energy)),
    )
    headings = (
        "system", "load", "requests/s", "USD/M blended", "USD/M prompt", "USD/M answer", "USD/M answers pay all",
        "J/token",
    )  # fmt: skip
    return Section(
        "cost", _text(prices, bool(energy)), tuple(c for c in charts if not c.empty), Table(headings, tuple(rows))
    )


def _money_mark(point: Point, cost: TokenCost, load: float) -> Mark:
    around, value = words.interval(point, words.TOKENS), words.metric(point, words.TOKENS) or 1.0
    interval = None if around is None else (cost.blended * value / around[1], cost.blended * value / around[0])
    note = f"{words.load_name(point)}: {words.digits(cost.blended)} USD a million tokens"
    return Mark(x=load, y=cost.blended, y_interval=interval, note=note, trusted=words.trusted(point))


def _row(name: str, point: Point, cost: TokenCost, load: float) -> tuple[str, ...]:
    figures = (load, cost.blended, cost.prompt, cost.answer, cost.answers_pay_all, cost.joules)
    return name, words.load_name(point), *(words.digits(figure) for figure in figures)


def _text(prices: Prices, energy: bool) -> str:
    each = ", ".join(f"{name or 'any machine'} {usd:g} USD an hour" for name, usd in prices.usd_per_hour.items())
    text = (
        f"Prices: {each}, of {prices.date}, from {prices.source}. A machine costs the same when it idles, so a token "
        f"is dear under low load. An answer token is charged as {prices.answer_weight:g} prompt tokens."
    )
    if prices.usd_per_kwh is not None:
        electricity = f"{prices.usd_per_kwh:g} USD a kWh, times a PUE of {prices.pue:g}"
        text += f" Electricity comes on top where a counter was read: {electricity}."
    return text + ("" if energy else " No point has an energy counter, so no energy is told.")
