"""The toy executable for this folder's tests."""

import os
import sys
from pathlib import Path

import pytest

import roofline

sys.path.insert(0, str(Path(__file__).parent))  # engine_fakes, which a spawned engine process imports by name too


@pytest.fixture
def fake_path() -> str:
    """The folder that a child process needs on PYTHONPATH to find engine_fakes."""
    return str(Path(__file__).parent)


@pytest.fixture
def fakes_everywhere(monkeypatch, fake_path) -> None:
    """Processes that a test starts find the package and engine_fakes."""
    source = str(Path(roofline.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, fake_path, os.environ.get("PYTHONPATH", "")]))
