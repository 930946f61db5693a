"""What commands print with --json."""

from typing import Any

Record = dict[str, Any]  # plain values, as --json prints them


def print_json(value: object, indent: int | None = None) -> None:
    """One JSON value on stdout."""
    import json

    print(json.dumps(value, indent=indent))
