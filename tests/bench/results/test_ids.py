"""The ids of points: a point that is read has the id that it was written with, whatever numbers it was made of."""

from pathlib import Path

import msgspec
import pytest

from roofline.bench.results.store import _hash, append_points, read_points, with_id
from roofline.common.errors import ConfigError
from tests.bench.report import made


def test_whole_numbers_in_place_of_floats_keep_their_id(tmp_path: Path) -> None:
    point = made.point(4)
    whole = msgspec.structs.replace(point, window=msgspec.structs.replace(point.window, measured_s=30, warm_up_s=2))
    path = tmp_path / "a.jsonl"
    append_points([whole], path)
    (read,) = read_points(path)
    assert read.id == with_id(whole).id == with_id(read).id


def test_a_changed_point_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_points([made.point(4)], path)
    path.write_text(path.read_text().replace('"cores":2', '"cores":3'))
    with pytest.raises(ConfigError, match="line 1: the point was changed after it was measured"):
        read_points(path)


def test_points_of_another_version_keep_their_id(tmp_path: Path) -> None:
    """A file with a field that this version does not have, as a later one writes it."""
    path = tmp_path / "a.jsonl"
    append_points([made.point(4)], path)
    fields = msgspec.json.decode(path.read_bytes())
    fields["client"]["hands"] = 2
    path.write_bytes(msgspec.json.encode({**fields, "id": _hash(msgspec.json.encode(fields))}) + b"\n")
    (point,) = read_points(path)
    assert point.client is not None
    assert point.client.trusted
