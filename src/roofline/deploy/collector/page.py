"""One replica's page of metrics as families of numbers: parsed by prometheus_client, bounded, and refused in words.

prometheus_client's parsers take time that grows with the square of a line's length and accept what Prometheus does not
(series that are there twice, counters that are no numbers), so both are looked at here.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_fd_to_metric_families as open_metrics_families
from prometheus_client.parser import text_fd_to_metric_families as text_families
from prometheus_client.samples import Sample

from roofline.deploy.collector.errors import ScrapeError

MAX_BYTES = 4 << 20  # of a page; one of `roofline serve` has about 32 KB a model
MAX_SERIES = 10_000  # of a page; one of `roofline serve` has about 290 a model
MAX_LINES = 4 * MAX_SERIES  # with what is said of families, and empty ones
MAX_LINE = 4096  # characters: the parser copies the end of a line once for each of its labels
MAX_COUNT = 2.0**63  # what a counter can be; beyond it sums of doubles have lost their last thousands
REPLICA_PREFIX = "replica:"  # of names under which a collector shows the series of single replicas
OWN_PREFIX = "roofline_fleet_"  # of a collector's own figures
COUNTED = ("counter", "histogram", "summary")  # kinds whose series only grow
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_BIRTH = "process_start_time_seconds"

PageParser = Callable[..., Iterable[Metric]]  # of lines; typed for open files, of which it reads no more
SeriesKey = tuple[str, tuple[tuple[str, str], ...]]  # name of the sample, its labels in the order of their names


@dataclass(frozen=True)
class MetricFamily:
    """The series of one name. kind: as Prometheus calls it; help: what the replica says of it."""

    name: str
    kind: str
    help: str
    series: dict[SeriesKey, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsPage:
    """What a replica showed in one scrape.

    birth: when its process began, in seconds since 1970: as it says itself, else when the oldest of its counters was
    made; None where it says neither. Another one than before means another process, whatever its counters show.
    """

    families: dict[str, MetricFamily]
    birth: float | None


def read_page(body: bytes, content_type: str, seconds: float) -> MetricsPage:
    """Return the families of a page. seconds: that parsing may take. Raises ScrapeError for what is no such page."""
    parse = _parser(content_type)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ScrapeError("its metrics are no UTF-8") from error
    families: dict[str, MetricFamily] = {}
    births: dict[str, float] = {}
    count = 0
    for metric in _parsed(parse, _lines(text, time.monotonic() + seconds)):
        if metric.name == "up" or metric.name.startswith((REPLICA_PREFIX, OWN_PREFIX)):
            continue  # of another collector, whose sums are taken as a replica's are
        family = families.setdefault(metric.name, MetricFamily(metric.name, metric.type, metric.documentation))
        if family.kind != metric.type:
            raise ScrapeError(f"{metric.name} is a {family.kind} and a {metric.type}")
        for sample in metric.samples:
            count += 1
            if count > MAX_SERIES:
                raise ScrapeError(f"it has more than {MAX_SERIES:,} series, and no more are read")
            _take(sample, family, births)
    _drop_births(families, births)
    for family in families.values():
        _check(family)
    return MetricsPage({name: family for name, family in families.items() if family.series}, _birth(families, births))


def _parser(content_type: str) -> PageParser:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/plain":
        return text_families
    if kind == "application/openmetrics-text":
        return open_metrics_families
    raise ScrapeError(f"it answers with {kind[:80] or 'no content type'}, which is no metrics: is this its /metrics?")


def _lines(text: str, end: float) -> Iterator[str]:
    """The lines of a page, until the time is over. Raises ScrapeError for one that would take the parser long."""
    at = count = 0
    while at < len(text):
        count += 1
        if count > MAX_LINES:
            raise ScrapeError(f"it has more than {MAX_LINES:,} lines, and no more are read")
        stop = text.find("\n", at)
        stop = len(text) if stop < 0 else stop
        if stop - at > MAX_LINE:
            raise ScrapeError(f"it has a line of {stop - at:,} characters, and {MAX_LINE:,} are read at most")
        if time.monotonic() > end:
            raise ScrapeError("its metrics take too long to parse")
        yield text[at : stop + 1]
        at = stop + 1


def _parsed(parse: PageParser, lines: Iterable[str]) -> Iterator[Metric]:
    try:
        yield from parse(lines)
    except ScrapeError:
        raise
    except Exception as error:  # the parsers raise what their code happens to: ValueError, IndexError, KeyError
        raise ScrapeError(f"its metrics cannot be parsed: {str(error)[:200] or type(error).__name__}") from error


def _take(sample: Sample, family: MetricFamily, births: dict[str, float]) -> None:
    """Put a sample into its family; when a counter was made goes into `births`."""
    if family.kind in COUNTED and sample.name == f"{family.name}_created":
        births[f"{sample.name}{sorted(sample.labels.items())}"] = sample.value
        return
    if family.kind == "summary" and sample.name == family.name:
        return  # quantiles of several processes have no sum
    names = (sample.name, *sample.labels)
    if bad := [name for name in names if not _NAME.fullmatch(name)]:
        raise ScrapeError(f"{bad[0][:80]!r} is no name of a series or a label that every Prometheus reads")
    key = sample.name, tuple(sorted(sample.labels.items()))
    if key in family.series:
        raise ScrapeError(f"{shown(key)} is there twice")
    family.series[key] = float(sample.value)


def _drop_births(families: dict[str, MetricFamily], births: dict[str, float]) -> None:
    """Take out what the older text form has of OpenMetrics' moments: a gauge of its own for each counter."""
    for name in [name for name in families if name.endswith("_created")]:
        counter = families.get(name.removesuffix("_created"))
        if counter is not None and counter.kind in COUNTED:
            births |= {str(key): value for key, value in families.pop(name).series.items()}


def _birth(families: dict[str, MetricFamily], births: dict[str, float]) -> float | None:
    process = families.get(_BIRTH)
    moments = list(process.series.values()) if process is not None else list(births.values())
    return min((moment for moment in moments if math.isfinite(moment)), default=None)


def _check(family: MetricFamily) -> None:
    """Raise ScrapeError for counts that can be none: they would be in the fleet's sums for good."""
    if family.kind not in COUNTED:
        return
    for key, value in family.series.items():
        is_sum = family.kind != "counter" and key[0] == f"{family.name}_sum"  # of observations below 0, too
        if not abs(value) < MAX_COUNT or (value < 0 and not is_sum):
            raise ScrapeError(f"{shown(key)} is {value}, which no count can be")
    if family.kind == "histogram":
        for labels, buckets in buckets_of(family).items():
            edges = [edge for edge, _ in buckets]
            if edges[-1] != math.inf or len(set(edges)) < len(edges):
                raise ScrapeError(f"the buckets of {shown((family.name, labels))} do not end at +Inf, or one is twice")
            if any(one > other for (_, one), (_, other) in pairwise(buckets)):
                raise ScrapeError(f"a bucket of {shown((family.name, labels))} has less than one below it")


def buckets_of(histogram: MetricFamily) -> dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]:
    """Return the buckets of each of a histogram's label sets, as (upper edge, count), the lowest first. Raises
    ScrapeError for an edge that is no number."""
    sets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for (name, labels), value in histogram.series.items():
        if name == f"{histogram.name}_bucket":
            edge = dict(labels).get("le", "")
            try:
                upper = float(edge)
            except ValueError:
                upper = math.nan
            if math.isnan(upper):
                raise ScrapeError(f"a bucket of {histogram.name} ends at {edge[:40]!r}, which is no number")
            sets.setdefault(without_edge(labels), []).append((upper, value))
    return {labels: sorted(buckets) for labels, buckets in sets.items()}


def without_edge(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the labels of a bucket without the one that names its edge."""
    return tuple(pair for pair in labels if pair[0] != "le")


def shown(key: SeriesKey) -> str:
    """Return a series as a message names it."""
    name, labels = key
    inner = ",".join(f'{label}="{value}"' for label, value in labels)
    text = f"{name}{{{inner}}}" if inner else name
    return text if len(text) <= 200 else f"{text[:199]}…"
