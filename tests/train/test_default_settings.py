"""Defaults are part of the interface: who leaves a key out gets the same run from every version."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pydantic_core import PydanticUndefined

from roofline.train.config import data_sets, objectives, observers, schema
from roofline.train.config.section import Section
from roofline.train.storage.store import Patience

EXPECTED = Path(__file__).parent / "default_settings.json"


def sections(module: ModuleType) -> Iterator[type[Section]]:
    """The sections that a module declares, with those inside of them."""
    waiting = [value for value in vars(module).values() if isinstance(value, type)]
    while waiting:
        section = waiting.pop()
        if issubclass(section, Section) and section.__module__ == module.__name__:
            yield section
            waiting += [value for value in vars(section).values() if isinstance(value, type)]


def defaults() -> dict[str, dict[str, str]]:
    """Section -> key -> default, as Python writes it; keys that have to be there are left out."""
    return {
        section.__qualname__: {
            key: repr(field.get_default(call_default_factory=True))
            for key, field in sorted(section.model_fields.items())
            if field.get_default(call_default_factory=True) is not PydanticUndefined
        }
        for module in (schema, data_sets, objectives, observers)
        for section in sorted(sections(module), key=lambda each: each.__qualname__)
    }


def test_no_default_changes_unnoticed() -> None:
    """A changed default is a decision: `python -m tests.train.test_default_settings` writes the file anew."""
    assert defaults() == json.loads(EXPECTED.read_text())


def test_patience_with_object_stores() -> None:
    assert Patience() == Patience(retries=10, wait=0.1, seconds=180, stall=60)


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps(defaults(), indent=1) + "\n")
