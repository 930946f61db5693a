"""Places that cannot be written, and packages that are not there."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from roofline.common import env, files
from roofline.common.errors import ConfigError


def test_what_cannot_be_kept_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    warnings = []
    logger = SimpleNamespace(warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(files.log, "get", lambda room: logger)
    monkeypatch.setattr(files, "_not_kept", set())
    for _ in range(2):
        with files.where_possible("figures are", tmp_path / "x"):
            raise OSError(errno.EROFS, "Read-only file system")
    place = f"{tmp_path / 'x'}: the file system is read-only"
    assert warnings == [f"figures are not kept: {place}; set ROOFLINE_HOME to a folder that can be written"]
    with pytest.raises(ValueError), files.where_possible("figures are", tmp_path):
        raise ValueError  # a bug of ours is no full disk


def test_the_entries_of_no_folder_are_none(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_text("")
    assert files.entries(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert files.entries(tmp_path / "a" / "c") == files.entries(tmp_path / "none") == []


def test_a_user_without_a_home_has_one_among_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.delenv("ROOFLINE_HOME", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "user")
    assert env.home() == tmp_path / "user" / ".cache" / "roofline"  # can be made
    (tmp_path / "user").write_text("")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    folder = env.home()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(Path, "home", no_home)
    assert env.home() == folder
    folder.rmdir()
    folder.symlink_to(tmp_path)  # somebody else was quicker
    with pytest.raises(ConfigError, match="is not this user's folder; set ROOFLINE_HOME"):
        env.home()


def test_a_missing_package_is_one_line_with_the_command_that_mends_it(run_python):
    code = """if True:
        import sys
        sys.modules["torch"] = None
        from roofline.cli.main import main
        sys.stderr = sys.stdout
        main(["bench", "train"])
        main(["train", "export", "x", "-o", "y"])
        main(["bench", "links"])
        from roofline.bundle import load
        from roofline.common.errors import UnsupportedError
        try:
            load("preset:mpt-125m", backend="reference", weights="random:0", text=False)
        except UnsupportedError as error:
            print(error)
        sys.modules["nothing_of_ours"] = None
        from roofline.common.extras import missing_package
        try:
            import nothing_of_ours
        except ImportError as error:
            assert missing_package(error) is None
    """
    lines = run_python(code).splitlines()
    message = "running this without torch is not supported: pip install 'roofline[{}]' brings it."
    train, gpu = message.format("train"), message.format("gpu")
    assert lines == [f"roofline: {train}", f"roofline: {train}", f"roofline: {gpu}", gpu]
