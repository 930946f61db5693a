"""How points and figures are written."""

import msgspec
import pytest

from roofline.bench.report import words
from roofline.bench.results.point import Device, Load
from tests.bench.report import made


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (Load(arrivals="closed", concurrency=1), "1 worker"),
        (Load(arrivals="closed", concurrency=2048), "2,048 workers"),
        (Load(arrivals="closed", concurrency=4, offered=3.0), "4 workers"),
        (Load(arrivals="batch", concurrency=8), "batch of 8"),
        (Load(arrivals="poisson", offered=2.5), "2.5/s poisson"),
        (Load(arrivals="ramp", offered=0.468, concurrency=4), "0.468/s ramp"),
        (Load(arrivals="trace"), "trace"),
        (None, "typical"),
    ],
)
def test_loads(load: Load | None, name: str) -> None:
    assert words.load_name(msgspec.structs.replace(made.point(4), load=load)) == name


def test_places_are_devices_where_there_are_any() -> None:
    point = made.point(4)
    gpus = [Device(name="MI300X", vendor="amd", count=8), Device(name="CPU", vendor="amd")]
    assert words.place(msgspec.structs.replace(point, devices=gpus)) == "8 x MI300X + CPU"
    assert words.place(msgspec.structs.replace(point, devices=[])) == "A CPU"
    assert words.machine(point) == "A CPU, 2 cores"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (0.01234, "0.0123"), (9.876, "9.88"), (99.94, "99.9"), (123.4, "123"),
        (12345.6, "12,346"), (-0.5, "-0.5"), (2.5e9, "2.5e+09"),
    ],
)  # fmt: skip
def test_digits(value: float | None, text: str) -> None:
    assert words.digits(value) == text


def test_intervals_and_shares() -> None:
    assert words.with_interval(12.34, (12.0, 12.61)) == "12.3 [12, 12.6]"
    assert words.with_interval(12.34, None) == "12.3"
    assert words.with_interval(None, (1.0, 2.0)) == "-"
    assert [words.percent(share) for share in (None, 0.012, 0.0999, 0.1, 0.625)] == ["-", "1.2%", "10.0%", "10%", "62%"]


def test_the_measured_roof_comes_before_the_data_sheet() -> None:
    point = made.point(4)
    assert point.limit is not None
    both = msgspec.structs.replace(point, limit=msgspec.structs.replace(point.limit, share_of_sheet=0.2))
    assert words.share(both) == pytest.approx(0.4)
    limit = msgspec.structs.replace(point.limit, share_of_sheet=0.2, share_of_measured=None)
    assert words.share(msgspec.structs.replace(point, limit=limit)) == 0.2
    assert words.share(msgspec.structs.replace(point, limit=None)) is None


def test_a_point_without_a_client_is_trusted() -> None:
    assert words.trusted(msgspec.structs.replace(made.point(4), client=None))
    assert not words.trusted(made.point(4, trusted=False))


def test_the_number_of_a_metric() -> None:
    figure = made.latencies(5.0)
    assert words.central(figure) == 5.0, "the median, of requests"
    assert words.central(msgspec.structs.replace(figure, value=7.0)) == 7.0
    assert words.central(msgspec.structs.replace(figure, p50=None)) == pytest.approx(5.5)
    assert words.central(None) is None
