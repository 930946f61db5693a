"""Models and a cache of their own for this folder's tests."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))  # bundle_models

from bundle_models import write_model

if TYPE_CHECKING:
    from library_binding import Library

    from roofline.backends.cpu.library import LibraryFiles


@pytest.fixture(scope="session")
def written_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("written") / "model")


@pytest.fixture(scope="session")
def home_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ROOFLINE_HOME with the models of the user's and what was measured, which is not measured again."""
    from roofline.common import env

    folder = tmp_path_factory.mktemp("home")
    for name in ("models", "kernels"):
        if (env.home() / name).is_dir():
            (folder / name).symlink_to(env.home() / name)
    if (env.home() / "roofs").is_dir():
        shutil.copytree(env.home() / "roofs", folder / "roofs")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_kept_in_the_home_of_the_user(home_of_tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bundles were compiled from is remembered in ROOFLINE_HOME, whatever folder they are written to."""
    monkeypatch.setenv("ROOFLINE_HOME", str(home_of_tests))


@pytest.fixture(scope="session")
def compiled_bundle(written_model: Path, home_of_tests: Path) -> Path:
    from roofline.bundle import compile_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOFLINE_HOME", str(home_of_tests))
        return compile_model(str(written_model), written_model.with_name("bundle")).path


@pytest.fixture
def model(written_model: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(written_model, tmp_path / "model"))


@pytest.fixture
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a test may change: compiled from its `model`, or where it has none a copy of a bundle of one like it."""
    from roofline.bundle import compile_model

    if "model" in request.fixturenames:
        return compile_model(str(request.getfixturevalue("model")), tmp_path / "bundle").path
    return Path(shutil.copytree(request.getfixturevalue("compiled_bundle"), tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def no_check_behind_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comparing weights in the background comes to is kept in ROOFLINE_HOME, which may be the user's own."""
    monkeypatch.setattr("roofline.backends.cpu.weights_check.DELAY", 1e6)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ROOFLINE_HOME with the cache of bundles switched on."""
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROOFLINE_BUNDLES", "on")
    return tmp_path / "home"


@pytest.fixture(scope="session")
def files() -> "LibraryFiles":
    from roofline.backends.cpu.library import library_files
    from roofline.common.errors import UnsupportedError

    try:
        return library_files()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library(files: "LibraryFiles") -> "Library":
    from library_binding import Library

    return Library(files.library)


@pytest.fixture(scope="session")
def compiled(files: "LibraryFiles", tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """compiled(C program) -> an executable, as `roofline lib --flags` would have it made."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    folder = tmp_path_factory.mktemp("c")

    def make(source: str) -> Path:
        program = folder / f"program{len(list(folder.iterdir()))}"
        program.with_suffix(".c").write_text(source)
        strict = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
        linked = [f"-I{files.include}", f"-L{files.library.parent}", "-lroofline", f"-Wl,-rpath,{files.library.parent}"]
        made = subprocess.run(
            ["gcc", *strict, str(program.with_suffix(".c")), *linked, "-o", str(program)],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        return program

    return make


@pytest.fixture
def without_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without a tokenizer are written with one of another vocabulary, or none."""
    from roofline.bundle import rewrite
    from roofline.bundle.text_side import load_text
    from roofline.weights.checkpoint import open_checkpoint

    text = load_text(open_checkpoint(model))
    monkeypatch.setattr(rewrite, "load_text", lambda checkpoint: text)
    monkeypatch.setattr("roofline.text.tokenizers.to_gguf.to_gguf", lambda *_: {})
