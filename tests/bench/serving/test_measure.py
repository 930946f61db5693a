"""What a point says beside its figures: counts of tokens, the client, flags, the grade."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from roofline.bench.load.events import read_events
from roofline.bench.load.plan import Plan, Probe
from roofline.bench.load.targets import Target
from roofline.bench.report.gather import gather
from roofline.bench.results.point import Host
from roofline.bench.results.store import read_points
from roofline.bench.results.window import most_in_flight
from roofline.bench.serving import measure
from roofline.bench.serving.certificate import LoadCertificate
from roofline.bench.serving.load_test import LoadTest, Settings
from roofline.bench.serving.measure import demand_of, point_of
from roofline.bench.serving.probes import fidelity
from roofline.bench.serving.recount import miscounted
from roofline.bench.traffic.presets import preset_traffic
from tests.bench.results.events import MS, request, run

WORDS = SimpleNamespace(encode=lambda text, add_special: text.split())
CERTIFICATE = LoadCertificate(
    streams=4, rate=100.0, ttft_added_ms=0.3, ttft_interval=(0.2, 0.4), gap_added_ms=0.01, cpu=0.1
)
PLAN = Plan(traffic="", events="", url="", model="", arrivals="closed", requests=20)


@pytest.fixture
def point(tmp_path):
    """point(requests, of the run..., fields of the test...) -> the point."""

    def make(requests, certificate=CERTIFICATE, version="1", in_process=None, **head):
        target = Target("http://x", "http://x/v1", "m", "ours", version, in_process=in_process)
        host = Host(chip="c", cores=2, memory_bytes=1)
        test = LoadTest(Settings("http://x"), target, preset_traffic("typical", 20), tmp_path, host, certificate, None)
        test.probes = [Probe("a", 1, "yes"), Probe("b", 1, "no")]
        return point_of(test, "curve", PLAN, run(requests, **{"client_cpu": 0.1, **head}))

    return make


def one_by_one(count=20, **fields):
    """Requests of which the next is sent when the last has ended."""
    return [request(at=100 * n, first=50, gap=10, number=n, **fields) for n in range(count)]


def test_tokens_are_counted_again():
    texts = ["a b c d", "a b", "a", None]
    events = run([request(at=0, first=9, tokens=4, text=text) for text in texts])
    assert miscounted(events, WORDS) == 1  # 4 and 2 may be due to an end without a text
    assert all(each.text is None for each in events.requests)
    assert miscounted(events, None) is None
    long = run([request(at=0, first=9, tokens=100, text="a " * count) for count in (100, 91, 89)])
    assert miscounted(long, WORDS) == 1
    reasoning = run([request(at=0, first=9, tokens=100, text="a", first_reasoning=9)])
    assert miscounted(reasoning, WORDS) == 0  # whose text is not all of the answer


def test_texts_of_probes_are_kept():
    events = run([request(at=0, first=9, text="x", probe=True)])
    miscounted(events, WORDS)
    assert events.requests[0].text == "x"


def test_probes_that_differ_are_told(point):
    answers = [
        request(at=0, first=9, probe=True, number=at, text=text) for at, text in ((0, "yes"), (1, "oh"), (0, "yes"))
    ]
    told = point([*one_by_one(), *answers]).fidelity
    assert (told.probes, told.equal) == (3, 2)
    assert "probes with other answers: 1 of 3" in point([*one_by_one(), *answers]).validity.flags
    assert not any("probes" in flag for flag in point([*one_by_one(), answers[0]]).validity.flags)
    assert fidelity(run(one_by_one(2)), []) is None


def test_a_trusted_client(point):
    told = point(one_by_one())
    assert told.client.trusted
    assert told.client.ttft_added_ci == (0.2, 0.4)
    assert told.validity.flags == ["too few requests for p99", "cache not known"]
    assert told.load.slip_p99_ms == 0


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"certificate": None}, "client not certified"),
        ({"client_cpu": 0.9}, "client used 90% of a core"),
        (
            {"certificate": LoadCertificate(0, 0.0, 3.0, None, 0.0, 0.1)},
            "client not to be trusted: it adds 3 ms to a first token",
        ),
        (
            {"certificate": LoadCertificate(4, 0.5, 0.3, None, 0.0, 0.1)},
            "client certified for 0.5 requests/s, not 10",
        ),
    ],
)
def test_a_client_that_is_not_trusted(point, monkeypatch, changes, flag):
    monkeypatch.setattr(measure, "certify", lambda streams, pace: replace(CERTIFICATE, streams=0, rate=0.0))
    told = point(one_by_one(), **changes)
    assert not told.client.trusted
    assert flag in told.validity.flags


def test_a_client_is_certified_again_at_the_pace_of_a_faster_server(point, monkeypatch):
    slow, asked = replace(CERTIFICATE, rate=2.0), []

    def certify(streams, pace):
        asked.append((streams, pace))
        return replace(CERTIFICATE, streams=streams, rate=12.0)

    monkeypatch.setattr(measure, "certify", certify)
    told = point(one_by_one(), certificate=slow)
    ((streams, pace),) = asked
    assert (streams, pace.first_ms, pace.gap_ms, pace.chunks) == (1, pytest.approx(40), pytest.approx(8), 4)
    assert told.client.trusted
    assert (told.client.most_streams, told.client.most_rate) == (1, 12.0)
    interrupted = point(one_by_one(), certificate=slow, interrupted=True)
    assert len(asked) == 1
    assert "client certified for 2 requests/s, not 10" in interrupted.validity.flags


def test_an_open_loop_with_more_at_a_time_is_certified_again(point, monkeypatch):
    asked = []

    def certify(streams, pace=None):
        asked.append(streams)
        return replace(CERTIFICATE, streams=streams)

    monkeypatch.setattr(measure, "certify", certify)
    requests = [request(at=10 * n, first=50, number=n) for n in range(20)]
    assert most_in_flight(run(requests)) == 8
    told = point(requests, arrivals="poisson", rate=100.0)
    assert (asked, told.client.trusted, told.client.most_streams) == ([8], True, 8)
    assert not point(requests).client.trusted, "a closed loop's workers are known before"
    assert asked == [8]


def test_ctrl_c_while_the_client_is_certified_again_keeps_the_point(point, monkeypatch):
    def certify(streams, pace):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "certify", certify)
    told = point(one_by_one(), certificate=replace(CERTIFICATE, rate=2.0))
    assert "interrupted" in told.validity.flags


def test_what_the_client_adds_to_gaps_is_told_beside_them(point):
    told = point(one_by_one(), certificate=replace(CERTIFICATE, gap_added_ms=0.6))
    assert "client adds 0.6 ms to gaps of 10 ms (6%)" in told.validity.flags
    assert told.client.trusted, "mean gaps and throughput do not change"
    assert not any("adds" in flag for flag in point(one_by_one()).validity.flags)


def test_a_client_that_is_late_is_not_trusted(point):
    late = [request(at=100 * n + 10, first=50, scheduled=100 * n) for n in range(20)]  # 10 ms of 80
    told = point(late)
    assert told.load.slip_p50_ms == pytest.approx(10)
    assert not told.client.trusted
    assert point([request(at=100 * n + 2, first=50, scheduled=100 * n) for n in range(20)]).client.trusted


def test_an_engine_in_this_process_has_no_client(point):
    told = point(one_by_one(), certificate=None, in_process=object(), client_cpu=None)
    assert told.client is None
    assert told.validity.flags == ["too few requests for p99", "cache not known"]
    assert (told.validity.grade, told.counts.tokens_by) == ("B", "engine")
    late = [request(at=100 * n + 10, first=50, scheduled=100 * n) for n in range(20)]
    assert "requests were sent late" in point(late, certificate=None, in_process=object()).validity.flags


def test_more_streams_than_were_certified_are_not_trusted(point):
    told = point([request(at=0, first=50, number=n) for n in range(5)])
    assert not told.client.trusted
    assert "client certified for 4 requests at a time, not 5" in told.validity.flags


@pytest.mark.parametrize(("cached", "cache"), [(None, "unknown"), (0, "cold"), (3, "warm")])
def test_what_is_known_of_the_cache(point, cached, cache):
    assert point(one_by_one(cached_tokens=cached)).workload.prefix_cache == cache
    assert demand_of([request(at=0, first=1, cached_tokens=cached)], 2).prompt == 7 - (cached or 0)


def test_a_kept_point_is_read_back(tmp_path, point):
    told = point(one_by_one())
    told.host.load = 2  # where a float is due
    settings = Settings("http://x", results=tmp_path / "r.jsonl", events=tmp_path / "e")
    test = LoadTest(settings, Target("x", "x", "x"), preset_traffic("typical", 1), tmp_path, told.host, None, None)
    kept = [test.keep(told, run(one_by_one())) for _ in range(2)]
    assert [each.events for each in kept] == [f"e/{test.run}-{n}.jsonl" for n in (1, 2)]
    assert [each.metrics for each in read_points(tmp_path / "r.jsonl")] == [told.metrics] * 2
    assert read_points(tmp_path / "r.jsonl") == kept  # with their ids
    assert read_events(tmp_path / kept[0].events) == run(one_by_one())


def test_grades_fall_with_what_is_missing(point):
    assert point(one_by_one()).validity.grade == "B"  # there is no limit
    assert point(one_by_one(), version="").validity.grade == "C"
    assert point(one_by_one(), version="", certificate=None).validity.grade == "D"
    assert point(one_by_one(3), version="", certificate=None).validity.grade == "D"


def test_a_run_without_a_lap_in_between_is_flagged(point):
    flag = "filling up and running empty are in the window"
    assert flag in point(one_by_one(6), concurrency=1).validity.flags
    assert flag not in point(one_by_one(7), concurrency=1).validity.flags


def test_answers_without_text_are_counted_and_flagged(point):
    empty = request(at=2000, first=1, chunks=[], end=2010 * MS, completion_tokens=0)
    told = point([*one_by_one(), empty])
    assert (told.counts.completed, told.counts.failed, told.counts.empty, told.counts.unfinished) == (20, 0, 1, 0)
    assert "answers without text: 1 of 21" in told.validity.flags
    assert not any("without text" in flag for flag in point(one_by_one()).validity.flags)


def test_answers_in_one_part_have_no_tpot_and_a_flag(point):
    together = [request(at=100 * n, first=80, gap=0, tokens=40, number=n) for n in range(20)]
    told = point(together)
    assert "answers arrive in one part or burst, their TPOT is not known: 20 of 20" in told.validity.flags
    assert not {"tpot", "decode_rate"} & told.metrics.keys()
    single = point([request(at=100 * n, first=80, tokens=1, number=n) for n in range(20)])
    assert not any("one part" in flag for flag in single.validity.flags), "one token is one part"


def test_answers_in_one_burst_have_no_tpot(point):
    """21 parts within 0.13 ms are what a client reads in one go, not tokens that took 0.0065 ms each."""
    burst = [request(at=100 * n, first=80, gap=0.0065, tokens=21, number=n) for n in range(20)]
    told = point(burst)
    assert "answers arrive in one part or burst, their TPOT is not known: 20 of 20" in told.validity.flags
    assert not {"tpot", "decode_rate"} & told.metrics.keys()
    quick = point([request(at=100 * n, first=80, gap=0.2, tokens=21, number=n) for n in range(20)])
    assert quick.metrics["tpot"].p50 == pytest.approx(0.2)


def test_probes_are_no_requests_that_failed(tmp_path, caplog):
    """The warning has the numbers that the point has, and the probes by themselves."""
    requests = [request(at=100 * n, first=50, gap=10, number=n) for n in range(20)]
    requests[0].error = "status 503"
    probes = [request(at=10, first=9, probe=True, number=0, error="status 503"), request(at=10, first=9, probe=True)]
    test = SimpleNamespace(send=lambda plan: run([*requests, *probes]), answered=0, failure="", keep=lambda *_: "kept")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(measure, "point_of", lambda *_: None)
        assert measure.measure(test, "load", PLAN) == "kept"
    assert caplog.messages == [
        "1 of 20 requests failed, the first with: status 503",
        "1 of 2 probes failed, the first with: status 503",
    ]


def test_a_usage_that_contradicts_the_parts_is_flagged(point):
    def flags(tokens, parts):
        requests = [request(at=100 * n, first=5, gap=1, tokens=tokens, parts=parts) for n in range(20)]
        return point(requests).validity.flags

    assert "the usage counts 3 tokens for a part of the answer: 20 of 20" in flags(60, 20)
    assert "the usage counts 0.5 tokens for a part of the answer: 20 of 20" in flags(20, 40)
    together = [request(at=100 * n, first=5, gap=0, tokens=60, parts=20) for n in range(20)]
    assert any("usage" in flag for flag in point(together).validity.flags), "parts that came at once are parts"
    assert not any("usage" in flag for flag in flags(22, 20)), "an end without text, and what a reader may differ by"


def test_a_server_that_falls_behind_is_flagged(point):
    flag = "the server falls behind the offered rate"
    late, kept = (
        [request(at=10 * n, first=50 + delay * n, scheduled=10 * n, number=n) for n in range(20)] for delay in (5, 0)
    )
    assert flag in point(late, arrivals="poisson", rate=100.0, certificate=None).validity.flags
    assert flag not in point(kept, arrivals="poisson", rate=100.0, certificate=None).validity.flags
    assert flag not in point(late, certificate=None).validity.flags, "workers of a closed loop wait"


def test_requests_that_were_sent_at_even_gaps_have_their_rate(point):
    requests = [request(at=100 * n, first=50, number=n) for n in range(20)]
    told = point(requests, end=1900, arrivals="constant", rate=10.0, certificate=None)
    assert told.load.achieved == pytest.approx(10)


def test_failures_and_counts_are_flagged(point):
    failed = [*one_by_one(), request(at=0, first=1, error="status 500")]
    assert "requests failed: 1 of 21" in point(failed).validity.flags
    chunks = one_by_one(completion_tokens=None)
    assert "tokens counted as parts of the answer" in point(chunks).validity.flags
    assert "interrupted" in point(one_by_one(), interrupted=True).validity.flags


def test_events_are_found_from_the_folder_of_the_results(tmp_path, monkeypatch):
    """Both are named from where the command runs, and reports read them from anywhere."""
    monkeypatch.chdir(tmp_path)
    settings = Settings("http://x", results=Path("c/x.jsonl"), events=Path("c/ev"))
    Path("c").mkdir()
    target = Target("http://x", "http://x/v1", "m", "ours", "1")
    host = Host(chip="c", cores=2, memory_bytes=1)
    test = LoadTest(settings, target, preset_traffic("typical", 20), tmp_path, host, CERTIFICATE, None)
    events = run(one_by_one(), client_cpu=0.1)
    kept = test.keep(point_of(test, "load", PLAN, events), events)
    assert kept.events is not None
    assert (Path("c") / kept.events).is_file()
    monkeypatch.chdir("/")
    gathered = gather([tmp_path / "c" / "x.jsonl"])
    assert (list(gathered.events), gathered.notes) == ([kept.id], [])
