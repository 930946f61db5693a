"""The toy executable for this folder's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # engine_fakes, which a spawned engine process imports by name too


@pytest.fixture
def fake_path() -> str:
    """The folder that a child process needs on PYTHONPATH to find engine_fakes."""
    return str(Path(__file__).parent)
