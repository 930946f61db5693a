"""The table of files that begin first names files that there are, and puts them first."""

from types import SimpleNamespace
from typing import Any

from tests.conftest import LONGEST, TESTS, pytest_collection_modifyitems


def test_the_longest_files_are_there_and_begin_first_in_the_order_of_the_table() -> None:
    assert not [name for name in LONGEST if not (TESTS / name).is_file()]
    names = ["common/test_files.py", *reversed(LONGEST), "weights/test_hub.py"]
    items: list[Any] = [SimpleNamespace(path=TESTS / name, number=number) for name in names for number in (1, 2)]
    pytest_collection_modifyitems(items)
    files = [*LONGEST, "common/test_files.py", "weights/test_hub.py"]
    assert [(item.path, item.number) for item in items] == [(TESTS / name, n) for name in files for n in (1, 2)]
