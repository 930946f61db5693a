"""Sums over replicas that count, restart, leave and come back, against what the published client has counted."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from roofline.deploy.collector import sums as sums_module
from roofline.deploy.collector.collector import render
from roofline.deploy.collector.page import read_page
from roofline.deploy.collector.rules import GAUGE_RULES
from roofline.deploy.collector.sums import FleetSums
from tests.deploy.collector.fake_replicas import TEXT, full_page

EDGES = (1.0, 4.0)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["count", "scrape", "restart", "leave"]), st.integers(0, 2), st.integers(0, 7)),
    max_size=60,
)


class Process:
    """A process of a replica, which counts with the published client. seen: by the last scrape that found it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counter = Counter("things", "Things.", ["model_name"], registry=self.registry)
        self.histogram = Histogram("sizes", "Sizes.", ["model_name"], buckets=EDGES, registry=self.registry)
        self.counter.labels("tiny"), self.histogram.labels("tiny")
        self.counted: list[int] = []
        self.seen: list[int] = []

    def count(self, size: int) -> None:
        self.counter.labels("tiny").inc(size)
        self.histogram.labels("tiny").observe(size)
        self.counted.append(size)

    def page(self, with_births: bool) -> bytes:
        text = generate_latest(self.registry).decode()
        if not with_births:
            text = "\n".join(line for line in text.splitlines() if "_created" not in line) + "\n"
        return text.encode()


def figures(sums: FleetSums) -> dict[str, float]:
    lines = [line for line in render(list(sums.families())).decode().splitlines() if not line.startswith("#")]
    return {
        name.replace('model_name="tiny"', "").replace(",}", "}"): float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines)
    }


def expected(observed: list[int]) -> dict[str, float]:
    """What one process would show that had counted all of these."""
    return {
        "things_total{}": sum(observed),
        'sizes_bucket{le="1.0"}': sum(size <= 1 for size in observed),
        'sizes_bucket{le="4.0"}': sum(size <= 4 for size in observed),
        'sizes_bucket{le="+Inf"}': len(observed),
        "sizes_count{}": len(observed),
        "sizes_sum{}": sum(observed),
    }


@given(ACTIONS)
@settings(max_examples=200)
def test_sums_are_what_all_processes_counted_and_never_go_back(actions):
    fleet, processes = FleetSums(), [Process() for _ in range(3)]
    ended: list[Process] = []
    before = dict.fromkeys(expected([]), 0.0)
    for action, number, size in actions:
        process = processes[number]
        if action == "count":
            process.count(size)
        elif action == "scrape":  # also of one that has left: it is there again
            assert fleet.take(str(number), read_page(process.page(True), TEXT, 10)) == []
            process.seen = list(process.counted)
        elif action == "leave":
            fleet.silent(str(number))
        else:
            ended.append(process)
            processes[number] = Process()
        now = figures(fleet)
        assert all(now.get(name, 0.0) >= value for name, value in before.items()), (before, now)
        before = dict.fromkeys(before, 0.0) | now
    observed = [size for process in (*ended, *processes) for size in process.seen]
    assert before == expected(observed)


@given(ACTIONS)
@settings(max_examples=200)
def test_without_the_moments_of_births_sums_still_never_go_back_and_invent_nothing(actions):
    """A process that has counted more than the one before it, when it is seen first, cannot be told from that one."""
    fleet, processes = FleetSums(), [Process() for _ in range(3)]
    ended: list[Process] = []
    before = dict.fromkeys(expected([]), 0.0)
    for action, number, size in actions:
        if action == "count":
            processes[number].count(size)
        elif action == "scrape":
            fleet.take(str(number), read_page(processes[number].page(False), TEXT, 10))
        elif action == "leave":
            fleet.silent(str(number))
        else:
            ended.append(processes[number])
            processes[number] = Process()
        now = figures(fleet)
        assert all(now.get(name, 0.0) >= value for name, value in before.items()), (before, now)
        before = dict.fromkeys(before, 0.0) | now
        most = expected([size for process in (*ended, *processes) for size in process.counted])
        assert all(value <= most[name] for name, value in before.items())
        assert before['sizes_bucket{le="+Inf"}'] == before["sizes_count{}"]


def page(text: str):
    return read_page(text.encode(), TEXT, 10)


def counter(value: float, birth: float | None = None) -> str:
    text = f"# TYPE x_total counter\nx_total {value}\n"
    return text if birth is None else f"{text}# TYPE x_created gauge\nx_created {birth}\n"


def test_a_process_of_another_birth_counts_from_zero_though_its_counter_is_higher():
    fleet = FleetSums()
    fleet.take("a", page(counter(5, birth=1.0)))
    fleet.take("a", page(counter(8, birth=2.0)))
    assert figures(fleet) == {"x_total": 13}
    assert fleet.restarts == 1


def test_a_late_replica_brings_nothing_of_its_past_but_all_that_it_counts_from_then_on():
    fleet = FleetSums()
    fleet.take("a", page(counter(1000)), with_history=False)
    assert figures(fleet) == {"x_total": 0}
    fleet.take("a", page(counter(1003)))
    assert figures(fleet) == {"x_total": 3}
    fleet.take("a", page(counter(2)))  # it began anew
    assert figures(fleet) == {"x_total": 5}


def histogram(*edges: str) -> str:
    lines = [f'h_bucket{{le="{edge}"}} 2' for edge in (*edges, "+Inf")]
    return "\n".join(["# TYPE h histogram", *lines, "h_count 2", "h_sum 3", "# TYPE x_total counter", "x_total 1", ""])


def test_histograms_of_other_buckets_are_refused_in_words_and_all_else_is_added():
    fleet = FleetSums()
    assert fleet.take("a", page(histogram("1", "5"))) == []
    (refused,) = fleet.take("b", page(histogram("1", "6")))
    assert refused.startswith("the buckets of h end at 1, 6, inf, and those of the replicas seen before at 1, 5, inf")
    assert fleet.take("c", page(histogram("1.0", "5.0"))) == []  # the same edges in other spelling
    shown = figures(fleet)
    assert (shown["h_count"], shown["h_sum"], shown["x_total"]) == (4, 6, 3)


def test_a_family_that_is_a_counter_here_and_a_gauge_there_is_not_added():
    fleet = FleetSums()
    fleet.take("a", page("# TYPE x_total counter\nx_total 1\n"))
    (refused,) = fleet.take("b", page('# TYPE x histogram\nx_bucket{le="+Inf"} 1\nx_count 1\nx_sum 1\n'))
    assert refused == "x is a histogram, and of the replicas seen before a counter"


def test_gauges_are_made_one_as_the_table_says():
    texts = {
        "a": "vllm:num_requests_running 3,vllm:kv_cache_usage_perc 0.5,roofline:engine_up 1,roofline:golden_kl 0.1",
        "b": "vllm:num_requests_running 4,vllm:kv_cache_usage_perc 1.0,roofline:engine_up 0,roofline:golden_kl NaN",
    }
    fleet = FleetSums()
    for name, text in texts.items():
        kinds = "".join(f"# TYPE {line.split()[0]} gauge\n{line}\n" for line in [*text.split(","), "unheard_of 7"])
        fleet.take(name, page(kinds))
    assert figures(fleet) == {
        "vllm:num_requests_running": 7,
        "vllm:kv_cache_usage_perc": 0.75,
        "roofline:engine_up": 0,
        "roofline:golden_kl": 0.1,
    }
    fleet.silent("b")
    assert figures(fleet)["vllm:num_requests_running"] == 3


def test_the_table_has_every_gauge_of_the_server_and_no_other():
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", full_page().decode(), re.MULTILINE))
    gauges = {name for name, kind in kinds.items() if kind == "gauge" and not name.endswith("_created")}
    assert set(GAUGE_RULES) == gauges, "a gauge of the server needs a row that says what it is of several replicas"


def test_every_family_of_the_server_is_in_the_fleet_or_is_said_to_stand_alone():
    fleet = FleetSums()
    assert fleet.take("a", read_page(full_page(), TEXT, 10)) == []
    shown = {re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0]) for name in figures(fleet)}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", full_page().decode(), re.MULTILINE))
    alone = {name for name, rule in GAUGE_RULES.items() if rule is None}
    assert shown == {name for name in kinds if not name.endswith("_created")} - alone


def test_labels_that_come_and_go_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(sums_module, "MAX_FLEET_SERIES", 25)
    monkeypatch.setattr(sums_module, "MAX_SERIES", 10)
    monkeypatch.setattr(sums_module, "MAX_REMEMBERED_SERIES", 30)
    fleet, refused = FleetSums(), []
    for number in range(20):
        lines = "".join(f'x_total{{a="{number}-{series}"}} 1\n' for series in range(10))
        refused = fleet.take("a", page(f"# TYPE x_total counter\n{lines}"))
    assert refused == ["the fleet has 25 series, and no new one is added"]
    assert len(figures(fleet)) == 25
    assert len(fleet._last["a"].counts) <= 2 * 10
    for number in range(20):
        fleet.take(f"r{number}", page(f"# TYPE x_total counter\n{lines}"))
        fleet.silent(f"r{number}")
    assert sum(len(seen.counts) for name, seen in fleet._last.items() if name != "a") <= 30 + 10
    assert figures(fleet).keys() == figures(fleet).keys()


def test_a_replica_that_was_forgotten_does_not_take_anything_along(monkeypatch):
    monkeypatch.setattr(sums_module, "MAX_REMEMBERED_SERIES", 0)
    fleet = FleetSums()
    fleet.take("a", page(counter(5)))
    fleet.silent("a")
    fleet.take("b", page(counter(1)))
    assert "a" not in fleet._last
    assert figures(fleet) == {"x_total": 6}


@pytest.mark.parametrize("families", [3, 4])
def test_names_that_come_and_go_do_not_fill_the_memory(monkeypatch, families):
    monkeypatch.setattr(sums_module, "MAX_FLEET_FAMILIES", 3)
    fleet = FleetSums()
    refused = fleet.take("a", page("".join(f"# TYPE x{n}_total counter\nx{n}_total 1\n" for n in range(families))))
    assert len(refused) == max(0, families - 3)
    assert len(figures(fleet)) == 3
    assert not any(math.isnan(value) for value in figures(fleet).values())


def test_a_histogram_begins_anew_as_a_whole():
    """The new process has more observations than the old one had, but fewer small ones: without births, that tells."""
    fleet = FleetSums()
    small = '# TYPE h histogram\nh_bucket{le="1"} 5\nh_bucket{le="+Inf"} 5\nh_count 5\nh_sum 5\n'
    large = '# TYPE h histogram\nh_bucket{le="1"} 0\nh_bucket{le="+Inf"} 7\nh_count 7\nh_sum 70\n'
    fleet.take("a", page(small))
    fleet.take("a", page(large))
    assert figures(fleet) == {'h_bucket{le="1"}': 5, 'h_bucket{le="+Inf"}': 12, "h_count": 12, "h_sum": 75}


def test_a_sum_that_falls_is_a_new_process_unless_observations_are_below_zero():
    def observed(edge: str, total: float) -> str:
        return f'# TYPE h histogram\nh_bucket{{le="{edge}"}} 1\nh_bucket{{le="+Inf"}} 1\nh_count 1\nh_sum {total}\n'

    fleet = FleetSums()
    fleet.take("a", page(observed("1", 0.5)))
    fleet.take("a", page(observed("1", 0.25)))  # one observation again, by another process
    assert (figures(fleet)["h_sum"], figures(fleet)["h_count"]) == (0.75, 2)
    fleet = FleetSums()
    fleet.take("a", page(observed("-1", 0.5)))
    fleet.take("a", page(observed("-1", 0.25)))
    assert (figures(fleet)["h_sum"], figures(fleet)["h_count"]) == (0.25, 1)
    fleet.take("a", page(observed("-1", -3)))
    assert figures(fleet)["h_sum"] == -3
