"""Series of metrics that were collected beside measured points: where they lie, and how they are read."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from roofline.bench.results.point import Point
from roofline.common.errors import UnsupportedError

# What reports draw of what `roofline serve` and vLLM show.
GENERATED, PROMPTS = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE, UP = "vllm:kv_cache_usage_perc", "up"
DRAWN = (GENERATED, PROMPTS, RUNNING, WAITING, CACHE, UP)
MARGIN_SECONDS = 10.0  # before and after a run, from which its first and last scrapes are taken
MOST_ROWS = 2_000_000  # of the series that are asked for; beyond it the rest is left out


@dataclass(frozen=True)
class CollectedSeries:
    """One figure of one replica over time: sums over its other labels. times: in seconds since 1970, rising."""

    replica: str
    name: str
    times: np.ndarray
    values: np.ndarray


def series_folder(results: Path) -> Path:
    """Return where the series of the points in a file of results lie: beside it."""
    return results.with_suffix(".series")


def read_collected(
    folder: Path, names: Collection[str], begin: float, end: float, note: Callable[[str], None]
) -> list[CollectedSeries]:
    """Return the series of these names between two moments, by replica and name. note: told of files that cannot be
    read, whose rows are missing. Raises UnsupportedError without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        remedy = "pip install 'roofline[series]' brings it"
        raise UnsupportedError(f"the series in {folder} without pyarrow", remedy) from error
    moments = [pyarrow.scalar(round(moment * 1e6), pyarrow.timestamp("us", "UTC")) for moment in (begin, end)]
    wanted = [("name", "in", list(names)), ("time", ">=", moments[0]), ("time", "<=", moments[1])]
    sums: dict[tuple[str, str], dict[int, float]] = {}
    count = 0
    for path in sorted(folder.glob("*.parquet")):
        try:
            table = parquet.read_table(path, columns=["time", "replica", "name", "value"], filters=wanted)
        except (pyarrow.ArrowException, OSError, KeyError) as error:
            note(f"{path} is no file of series, so its rows are in no chart: {str(error).splitlines()[0][:200]}")
            continue
        count += table.num_rows
        if count > MOST_ROWS:
            note(f"{folder} has more than {MOST_ROWS:,} rows to draw; those from {path.name} on are left out")
            break
        times = table["time"].cast(pyarrow.int64()).to_pylist()
        columns = [table[name].to_pylist() for name in ("replica", "name", "value")]
        for moment, replica, name, value in zip(times, *columns, strict=True):
            of_series = sums.setdefault((str(replica), str(name)), {})
            of_series[moment] = of_series.get(moment, 0.0) + value
    return [_series(replica, name, values) for (replica, name), values in sorted(sums.items())]


def _series(replica: str, name: str, values: dict[int, float]) -> CollectedSeries:
    times = sorted(values)
    return CollectedSeries(replica, name, np.array(times) / 1e6, np.array([values[moment] for moment in times]))


def start_of(points: Sequence[Point]) -> float:
    """Return when the first of these points was begun, in seconds since 1970."""
    return min(datetime.fromisoformat(point.started).timestamp() for point in points)


def end_of(points: Sequence[Point]) -> float:
    """Return when the load of the last of these points had ended, in seconds since 1970."""
    return max(start_of([point]) + _seconds(point) for point in points)


def _seconds(point: Point) -> float:
    return point.window.warm_up_s + point.window.measured_s + point.window.cool_down_s
