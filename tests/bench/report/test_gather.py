"""Merging files of points: what is kept, what is refused, what is noted."""

from pathlib import Path

import msgspec
import pytest

from roofline.bench.report import gather as module
from roofline.bench.report.gather import gather, impossible, of_points
from roofline.bench.results.store import append_points, with_id
from roofline.common.errors import ConfigError
from tests.bench.report import made


def test_files_are_merged_and_each_point_counts_once(tmp_path: Path) -> None:
    append_points(made.curve(), tmp_path / "a.jsonl")
    append_points([*made.curve(chip="Another CPU"), made.point(1)], tmp_path / "b.jsonl")
    gathered = gather([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert len(gathered.points) == 12, "point(1) is in both"
    assert gathered.places == ["A CPU", "Another CPU"]
    assert [kind.system for kind in gathered.kinds] == ["ours 1.0", "ours 1.0"]
    assert list(gathered.kinds.values()) == [0, 1]
    assert [gathered.name(kind) for kind in gathered.kinds] == ["ours 1.0, A CPU", "ours 1.0, Another CPU"]
    assert of_points(made.curve()).name(next(iter(gathered.kinds))) == "ours 1.0"


def test_points_are_in_the_order_of_their_load() -> None:
    """Closed loops come before scheduled arrivals."""
    gathered = of_points([made.point(4, rate=3.0), made.point(4, rate=0.5), *reversed(made.curve())])
    loads = [point.load.concurrency or point.load.offered for point in gathered.points if point.load]
    assert loads == [1, 2, 4, 8, 16, 32, 0.5, 3.0]


def test_only_points_of_one_traffic_share_a_chart() -> None:
    gathered = of_points([*made.curve(), *made.curve(sha256="b" * 64), *made.curve(preset="long")])
    assert [(preset, sha256[0], len(points)) for (preset, sha256), points in gathered.traffics().items()] == [
        ("typical", "a", 6), ("typical", "b", 6), ("long", "a", 6),
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "refused"), [(0.9, False), (1.02, False), (1.03, True), (4.0, True)])
def test_what_exceeds_the_limit_is_refused_with_the_arithmetic(share: float, refused: bool) -> None:
    point = made.point(4, share=share)
    gathered = of_points([point])
    assert bool(gathered.refused) is refused
    assert len(gathered.points) == (not refused)
    if refused:
        rate = 240 / share
        assert (
            f"240 tokens/s were measured, and {rate:.3g} are possible at most by the measured roof"
            in gathered.refused[0]
        )
        assert "roofs (50.0 GB/s, 1000.0 Gop/s): 2.4e+13 operations and 894.1 GiB of weights" in gathered.refused[0]
        assert "take 40.0 s, bound by memory" in gathered.refused[0]
        assert f"{share:.0%} of the limit" in gathered.refused[0]


def test_the_data_sheet_refuses_too() -> None:
    point = made.point(4)
    limit = point.limit
    assert limit is not None
    limit = msgspec.structs.replace(limit, share_of_measured=None, share_of_sheet=1.5, bound="compute")
    devices = [msgspec.structs.replace(point.devices[0], sheet_flops=2e12, count=2)]
    text = impossible(msgspec.structs.replace(point, limit=limit, devices=devices))
    assert "by the data sheet's roofs (2.0 Top/s): 2.4e+13 operations" in text
    assert "bound by compute. That is 150% of the limit" in text
    assert impossible(msgspec.structs.replace(point, limit=None)) == ""


def test_events_beside_the_results_are_read(tmp_path: Path) -> None:
    point = made.with_events(made.point(4), tmp_path)
    append_points([point], tmp_path / "a.jsonl")
    gathered = gather([tmp_path / "a.jsonl"])
    assert len(gathered.events[point.id].requests) == 200
    assert gathered.notes == []


def test_events_that_are_missing_or_others_are_noted(tmp_path: Path) -> None:
    gone = with_id(msgspec.structs.replace(made.point(2), events="gone.jsonl", events_sha256="c" * 64))
    changed = made.with_events(made.point(4), tmp_path, "changed.jsonl")
    broken = with_id(msgspec.structs.replace(made.point(8), events="broken.jsonl"))
    append_points([gone, changed, broken], tmp_path / "a.jsonl")
    with (tmp_path / "changed.jsonl").open("ab") as stream:
        stream.write(b"\n")
    (tmp_path / "broken.jsonl").write_text("{}\n")
    gathered = gather([tmp_path / "a.jsonl"])
    assert gathered.events == {}
    assert len(gathered.points) == 3, "figures are in the points all the same"
    assert "2 workers: its raw events are not at" in gathered.notes[0]
    assert "does not hold the events that it was measured from" in gathered.notes[1]
    assert "is not a file of events" in gathered.notes[2]


def test_files_without_points_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"empty.jsonl: there is no point; measure some"):
        gather([tmp_path / "empty.jsonl"])
    append_points(made.curve(), tmp_path / "a.jsonl")
    monkeypatch.setattr(module, "MOST_POINTS", 5)
    with pytest.raises(ConfigError, match="6 points are more than a report has room for"):
        gather([tmp_path / "a.jsonl"])


def test_events_are_where_the_results_say_whatever_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older commands wrote the path from where they ran; newer ones that from the folder of the results."""
    (tmp_path / "c" / "ev").mkdir(parents=True)
    point = made.with_events(made.point(4), tmp_path / "c" / "ev")
    assert point.events is not None
    for place, older in ((f"c/ev/{point.events}", True), (f"ev/{point.events}", False)):
        results = tmp_path / "c" / f"{older}.jsonl"
        append_points([with_id(msgspec.structs.replace(point, events=place))], results)
        monkeypatch.chdir(tmp_path)
        gathered = gather([Path("c") / results.name])
        assert (len(gathered.events), gathered.notes) == (1, [])
        monkeypatch.chdir(tmp_path / "c")
        assert len(gather([Path(results.name)]).events) == (0 if older else 1)
