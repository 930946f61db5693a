"""Places that cannot be written, and packages that are not there."""

import errno
import os
import subprocess
import sys
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


def test_links_and_pipes_are_written_into_and_not_replaced(tmp_path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    files.write_atomically(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_atomically(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_place_that_is_not_there_is_told_as_it_was_named(tmp_path):
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as raised:
        files.write_atomically(path, "x")
    assert raised.value.filename == str(path)


def test_a_full_disk_is_told_with_the_file_and_leaves_what_was_there(tmp_path):
    """As of a full disk: a process whose files may not grow."""
    path = tmp_path / "page.html"
    path.write_text("old")
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from roofline.common.files import write_atomically
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_atomically(Path(sys.argv[1]), "x" * 5000)
        except OSError as error:
            sys.exit(0 if error.filename == sys.argv[1] else f"{error.filename}")
        sys.exit("written")
    """
    done = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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


def test_forms_of_answers_are_part_of_the_plain_install_and_imported_when_one_is_asked_for(run_python):
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(package.startswith("llguidance") for package in project["dependencies"])
    assert project["optional-dependencies"]["structured"] == [], "roofline[structured] can still be named"
    imported = run_python("""if True:
        import sys
        import roofline.cli.main, roofline.engine.process.main, roofline.server.serve
        print([name for name in sys.modules if name.startswith(("llguidance", "cryptography", "torch"))])
    """)
    assert imported.strip() == "[]"


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
