"""Names that stand twice in one object of JSON, of which programs take the first, the last, or neither."""

import json


def repeated_name(data: bytes) -> str | None:
    """A name that an object of a JSON text has twice; None: there is none. Another reader has read the text already.

    This takes some times as long as reading it: `count_names` tells sooner whether there is one.
    """
    twins: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twins.extend(name for name in names if names.count(name) > 1)

    json.loads(data, object_pairs_hook=note, parse_int=float)  # int refuses numbers of more than 4,300 digits
    return twins[0] if twins else None


def count_names(value: object, containers: int) -> int:
    """How many names the objects of parsed JSON have: fewer than its text, where one stands twice.

    containers: objects and arrays of the text: where all of them are found, long lists of numbers are not gone through.
    """
    names, pending, missing = 0, [value], containers - 1
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            names += len(part)
        if missing and isinstance(part, dict | list):
            values = part.values() if isinstance(part, dict) else part
            inner = [each for each in values if isinstance(each, dict | list)]
            missing -= len(inner)
            pending += inner
    return names
