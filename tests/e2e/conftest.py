"""Fixtures with real processes: skipped, with the reason, where the native module or the model is missing."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for e2e_serving, which tests of this folder share

from e2e_serving import Served, serving


@pytest.fixture(scope="session")
def model(smollm2_path) -> Path:
    pytest.importorskip("roofline._native", reason="the native module is not built")
    return smollm2_path


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """Ours, with the package importable from where this test session has it."""
    import roofline

    source = str(Path(roofline.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


@pytest.fixture(scope="module")
def served(environment, model) -> Iterator[Served]:
    with serving(environment, model, "--cache-tokens", "8192") as running:
        yield running
