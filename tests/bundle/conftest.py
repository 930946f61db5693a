"""Models and a cache of their own for this folder's tests."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))  # bundle_models

from bundle_models import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def bundle(model: Path, tmp_path: Path) -> Path:
    from roofline.bundle import compile_model

    return compile_model(str(model), tmp_path / "bundle").path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ROOFLINE_HOME with the cache of bundles switched on."""
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROOFLINE_BUNDLES", "on")
    return tmp_path / "home"
