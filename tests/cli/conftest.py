"""What tests of the command line share."""

from collections.abc import Iterator

import pytest

from tests.compiled_shapes import shapes_compiled_once


@pytest.fixture(scope="module", autouse=True)
def shapes_are_compiled_once() -> Iterator[None]:
    with shapes_compiled_once():
        yield
