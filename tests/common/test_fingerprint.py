"""The identity of the package's sources tells any change of them, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from roofline.common import fingerprint as identity


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two rooms, which the identity is asked of."""
    folder = tmp_path / "package"
    for name in ("models/llama.py", "models/parts/norm.py", "server/app.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"NAME = {name!r}\n")
    monkeypatch.setattr(identity, "PACKAGE", folder)
    identity.fingerprint.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def of_the_package_again() -> object:
    yield
    identity.fingerprint.cache_clear()


def _now(*rooms: str) -> str:
    """The identity as another process would have it."""
    identity.fingerprint.cache_clear()
    return identity.fingerprint(*rooms)


def test_a_byte_that_changes_unseen_by_size_and_time_is_told(package: Path) -> None:
    file = package / "models" / "parts" / "norm.py"
    before, times = _now(), file.stat()
    file.write_text(file.read_text().replace("NAME", "name"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert _now() != before


def test_the_same_sources_elsewhere_and_of_another_time_are_the_same(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _now(), _now("models")
    shutil.copytree(package, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    for file in (tmp_path / "elsewhere").rglob("*.py"):
        os.utime(file, (1, 1))
    monkeypatch.setattr(identity, "PACKAGE", tmp_path / "elsewhere")
    assert (_now(), _now("models")) == before


def test_a_file_under_another_name_and_bytes_that_move_over_are_told(package: Path) -> None:
    keys = {_now()}
    (package / "models" / "llama.py").rename(package / "models" / "llama2.py")
    keys.add(_now())
    (package / "models" / "llama2.py").write_text("")
    (package / "models" / "parts" / "norm.py").write_text("NAME = 'models/llama.py'\nNAME = 'models/parts/norm.py'\n")
    keys.add(_now())
    assert len(keys) == 3


def test_rooms_are_told_apart(package: Path) -> None:
    models, whole = _now("models"), _now()
    (package / "server" / "app.py").write_text("changed\n")
    assert _now("models") == models
    assert _now() != whole


def test_bundles_and_joined_processes_have_the_same_one(package: Path) -> None:
    """Sources that differ in content alone make another bundle, and processes with them do not train together."""
    pytest.importorskip("torch", reason="training is torch's")
    from roofline.bundle import bundle_cache
    from roofline.train.parallel import alike

    for room in bundle_cache.COMPILER:
        (package / room).mkdir(parents=True, exist_ok=True)
    source, file = package / "model.gguf", package / "models" / "llama.py"
    source.write_bytes(bytes(100))
    before = bundle_cache.key_of(source), alike.of_code()["Roofline"]
    os.utime(file, (1, 1))
    identity.fingerprint.cache_clear()
    assert (bundle_cache.key_of(source), alike.of_code()["Roofline"]) == before
    file.write_text(file.read_text().replace("NAME", "name"))
    os.utime(file, (1, 1))
    identity.fingerprint.cache_clear()
    after = bundle_cache.key_of(source), alike.of_code()["Roofline"]
    assert after[0] != before[0]
    assert after[1] != before[1]
