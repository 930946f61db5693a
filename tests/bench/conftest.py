"""Makes the builders of this folder and of tests/program importable."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compiled_shapes import shapes_compiled_once

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / room) for room in ("program", "engine"))]


@pytest.fixture(scope="module", autouse=True)
def shapes_are_compiled_once() -> Iterator[None]:
    with shapes_compiled_once():
        yield
