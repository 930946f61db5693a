"""What is a page of metrics, and what is refused: pages of the published client, and of servers that misbehave."""

import time

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open

from roofline.deploy.collector import page as page_module
from roofline.deploy.collector.errors import ScrapeError
from roofline.deploy.collector.page import read_page
from tests.deploy.collector.fake_replicas import TEXT, full_page

OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("calls", "Calls.", ["who"], registry=made).labels('a"b\\c\nd').inc(3)
    Gauge("level", "Level.", registry=made).set(-1.5)
    Histogram("sizes", "Sizes.", buckets=(1, 2), registry=made).observe(1.5)
    Summary("times", "Times.", registry=made).observe(2)
    Info("build", "Build.", registry=made).info({"version": "1"})
    return made


@pytest.mark.parametrize(("write", "kind"), [(generate_latest, TEXT), (generate_open, OPEN)])
def test_both_forms_are_read_as_the_client_counted(write, kind):
    families = read_page(write(registry()), kind, 10).families
    assert families["calls"].kind == "counter"
    assert families["calls"].series == {("calls_total", (("who", 'a"b\\c\nd'),)): 3}
    assert families["level"].series == {("level", ()): -1.5}
    assert families["sizes"].series == {
        ("sizes_bucket", (("le", "1.0"),)): 0,
        ("sizes_bucket", (("le", "2.0"),)): 1,
        ("sizes_bucket", (("le", "+Inf"),)): 1,
        ("sizes_count", ()): 1,
        ("sizes_sum", ()): 1.5,
    }
    assert families["times"].series == {("times_count", ()): 1, ("times_sum", ()): 2}
    assert not [name for name in families if name.endswith("_created")]


@pytest.mark.parametrize(("write", "kind"), [(generate_latest, TEXT), (generate_open, OPEN)])
def test_the_birth_is_that_of_the_oldest_counter(write, kind):
    before = time.time()
    made = registry()
    birth = read_page(write(made), kind, 10).birth
    assert birth is not None
    assert before <= birth <= time.time()
    assert read_page(write(made), kind, 10).birth == birth


def test_a_process_that_says_when_it_began_is_believed():
    assert read_page(full_page() + b"process_start_time_seconds 1234.5\n", TEXT, 10).birth == 1234.5


def test_figures_of_another_collector_are_left_out():
    text = b"# TYPE up gauge\nup 1\n# TYPE roofline_fleet_restarts_total counter\nroofline_fleet_restarts_total 1\n"
    text += b"# TYPE replica:x_total counter\nreplica:x_total 1\n# TYPE x_total counter\nx_total 1\n"
    assert list(read_page(text, TEXT, 10).families) == ["x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# TYPE x_total counter\nx_total NaN\n", "x_total is nan, which no count can be"),
        (b"# TYPE x_total counter\nx_total -1\n", "x_total is -1.0, which no count can be"),
        (b"# TYPE x_total counter\nx_total +Inf\n", "x_total is inf, which no count can be"),
        (b"# TYPE x_total counter\nx_total 1e300\n", r"x_total is 1e\+300, which no count can be"),
        (b'# TYPE x gauge\nx{a="1"} 1\nx{a="1"} 2\n', 'x{a="1"} is there twice'),
        (b"# TYPE x gauge\nx 1\n# TYPE y gauge\ny 1\n# TYPE x counter\nx 1\n", "x is a gauge and a counter"),
        (b"\xff\xfe\n", "no UTF-8"),
        (b"<html>\n", "cannot be parsed"),
        (b'{"ready": true}\n', "cannot be parsed|is no name"),
        (b"# TYPE x nonsense\nx 1\n", "cannot be parsed"),
        (b'{"a b", c="1"} 1\n', "is no name of a series"),
        (b'# TYPE h histogram\nh_bucket{le="1"} 3\nh_bucket{le="+Inf"} 2\n', "has less than one below it"),
        (b'# TYPE h histogram\nh_bucket{le="1"} 3\n', "do not end at"),
        (b'# TYPE h histogram\nh_bucket{le="1"} 3\nh_bucket{le="1.0"} 3\nh_bucket{le="+Inf"} 3\n', "or one is twice"),
        (b'# TYPE h histogram\nh_bucket{le="wide"} 3\n', "ends at 'wide', which is no number"),
        (b'x{a="' + b"l" * 5000 + b'"} 1\n', "a line of 5,009 characters"),
        (b"x" * 5000, "a line of 5,000 characters"),
    ],
)
def test_what_no_page_can_say_is_refused_in_words(text, message):
    with pytest.raises(ScrapeError, match=message.replace("{", r"\{")):
        read_page(text, TEXT, 10)


@pytest.mark.parametrize("kind", ["text/html", "application/json; charset=utf-8", ""])
def test_other_content_is_refused_by_its_type(kind):
    with pytest.raises(ScrapeError, match="which is no metrics"):
        read_page(b"x 1\n", kind, 10)


def test_a_page_of_too_many_series_is_refused(monkeypatch):
    monkeypatch.setattr(page_module, "MAX_SERIES", 10)
    monkeypatch.setattr(page_module, "MAX_LINES", 20)
    with pytest.raises(ScrapeError, match="it has more than 20 lines"):
        read_page(b"# a comment\n" * 21, TEXT, 10)
    lines = b"".join(b'x{a="%d"} 1\n' % number for number in range(11))
    with pytest.raises(ScrapeError, match="it has more than 10 series"):
        read_page(lines, TEXT, 10)
    assert len(read_page(lines[: -len(b'x{a="10"} 1\n')], TEXT, 10).families["x"].series) == 10


def test_parsing_ends_when_its_time_is_over():
    with pytest.raises(ScrapeError, match="too long to parse"):
        read_page(full_page(), TEXT, 0.0)


def test_lines_that_cost_the_parser_most_are_bounded_in_time():
    """Each label has the parser copy the end of the line: a page of such lines is cut off by the clock."""
    line = b"x{" + b",".join(b'a%d="\\""' % number for number in range(350)) + b"} 1\n"
    assert len(line) < page_module.MAX_LINE
    began = time.monotonic()
    with pytest.raises(ScrapeError):
        read_page(line * (page_module.MAX_BYTES // len(line)), TEXT, 0.2)
    assert time.monotonic() - began < 20  # a line takes milliseconds; without the clock it is minutes
