"""Nested settings as one level of dotted names."""

from collections.abc import Iterator

from roofline.common.json_types import JsonMapping


def flatten(settings: JsonMapping, stem: str = "") -> Iterator[tuple[str, object]]:
    """("section.key", value) of every value, in order."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{stem}{key}.")
        else:
            yield f"{stem}{key}", value
