"""What is wrong with a configuration, in one sentence that names the key."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from roofline.common.names import did_you_mean


def said(error: ValidationError, given: Mapping[str, Any], root: type[BaseModel]) -> str:
    """The first fault of what was `given` for a `root`: which key, what is wrong, what was meant."""
    fault, *others = error.errors()
    path = _path(fault, given)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}{did_you_mean(path[-1], _known(path[:-1], root))}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    same = [other for other in others if _path(other, given) == path]  # a union has a fault for each of its types
    texts = dict.fromkeys(f"{each['msg'][0].lower()}{each['msg'][1:]}" for each in (fault, *same))
    more = f" (and {len(others) - len(same)} more)" if len(others) > len(same) else ""
    shown = "" if fault["input"] is None else f" = {str(fault['input'])[:80]}"
    return f"{key}{shown}: {', or '.join(texts)}{more}"


def _path(fault: Any, given: Mapping[str, Any]) -> list[str]:
    """The keys of a fault's place, without what pydantic puts between them: names of types."""
    *steps, last = fault["loc"]
    missing = fault["type"] == "missing"
    path, node = [], given
    for step in steps if missing else (*steps, last):
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    return [*path, str(last)] if missing else path


def _known(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """Keys of the section at a path."""
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
