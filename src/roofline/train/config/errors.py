"""Describes what is wrong with a configuration in one sentence that names the key."""

from collections.abc import Sequence
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roofline.common.json_types import JsonMapping
from roofline.common.names import did_you_mean


def describe(error: ValidationError, values: JsonMapping, root: type[BaseModel]) -> str:
    """The first fault of `values` as a `root`: the key, what is wrong with it, and the nearest known key.

    A value of a union type has a fault for each of its types: their messages are joined.
    """
    fault, *rest = error.errors()
    path = _path(fault, values)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(path[-1], _section_keys(path[:-1], root))}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    same_key = [other for other in rest if _path(other, values) == path]
    texts = dict.fromkeys(f"{each['msg'][0].lower()}{each['msg'][1:]}" for each in (fault, *same_key))
    more = f" (and {len(rest) - len(same_key)} more)" if len(rest) > len(same_key) else ""
    value = "" if fault["input"] is None else f" = {str(fault['input'])[:80]}"
    return f"{key}{value}: {', or '.join(texts)}{more}"


def _path(fault: ErrorDetails, values: JsonMapping) -> list[str]:
    """The keys that lead to a fault, without the names of types that pydantic puts between them."""
    *steps, last = fault["loc"]
    missing = fault["type"] == "missing"
    path: list[str] = []
    node: object = values
    for step in steps if missing else (*steps, last):
        try:
            node = node[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    return [*path, str(last)] if missing else path


def _section_keys(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """The keys of the section at a path."""
    section, steps = root, iter(path)
    for step in steps:
        field = section.model_fields.get(step)
        options = [field.annotation, *get_args(field.annotation)] if field is not None else []
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if field is None or inner is None:
            return []
        section = inner
        if get_origin(field.annotation) is dict:
            next(steps, None)
    return list(section.model_fields)
