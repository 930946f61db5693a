"""Files of points: a point that is read has the id that it was written with; a file that was cut off can be read, and
added to."""

import os
import subprocess
import sys
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


def test_a_file_that_was_cut_off_is_read_and_added_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    append_points([made.point(1), made.point(2)], path)
    assert not caplog.messages
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_points(path)) == 1
    assert caplog.messages == [f"{path}: its last line was cut off, as of a run that was killed; it is left out"]
    append_points([made.point(4)], path)
    assert [point.load and point.load.concurrency for point in read_points(path)] == [1, 4]


def test_a_full_disk_adds_nothing_and_is_told_with_the_file(tmp_path: Path) -> None:
    """As of a full disk: a process whose files may not grow."""
    path = tmp_path / "a.jsonl"
    append_points([made.point(1)], path)
    before = path.read_bytes()
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from roofline.bench.results.store import append_points, read_points
        path = Path(sys.argv[1])
        points, size = read_points(path), path.stat().st_size
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        try:
            append_points(points, path)
        except OSError as error:
            sys.exit(0 if error.filename == sys.argv[1] else f"{error.filename}")
        sys.exit("written")
    """
    done = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == before


def test_points_go_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    append_points([made.point(1)], pipe)
    assert b'"cores":2' in os.read(reader, 1 << 16)
    os.close(reader)
