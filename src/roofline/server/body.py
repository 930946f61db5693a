"""Bytes of a request's body -> fields of a JSON object -> a typed body, or a RequestError that names the field."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, from_json

from roofline.common.errors import RequestError
from roofline.common.json_depth import json_structure
from roofline.common.json_escapes import parsed
from roofline.common.json_names import count_names, repeated_name
from roofline.server.limits import Limits

MAX_PROBLEMS = 1000
SPREAD = "Spread them over several requests, or send a long prompt as one text."
_SHOULD_BE = "Input should be "
_JSON_TYPES = {
    **{"string_type": "a string", "list_type": "an array", "bool_type": "true or false", "float_type": "a number"},
    **{"int_type": "a whole number", "dict_type": "an object", "model_type": "an object", "none_required": "null"},
}


def _end_at_first_problem(schema: object) -> None:
    """Have lists checked up to their first problem: a million others would take seconds to be written down."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_problem(part)
    elif isinstance(schema, list):
        for part in schema:
            _end_at_first_problem(part)


class Body(BaseModel):
    """No field is guessed at: unknown names, other types and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_at_first_problem(schema)
        return schema


AnyBody = TypeVar("AnyBody", bound=Body)


def invalid(field: str, problem: str) -> RequestError:
    """A field with a value that cannot be used."""
    return RequestError(400, "invalid_value", f"{field}: {problem}.", param=field)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of fields name them as the API does, and others beside which a value is wrong. names: from ours to the
    API's."""
    try:
        yield
    except RequestError as error:
        ours, message = error.param or "", str(error)
        name = names.get(ours, ours)
        if name != ours and message.startswith(ours):
            message = name + message.removeprefix(ours)
        for word in (each for each in names if "_" in each):  # others are words of the language too
            message = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w|\.\w)", names[word], message)
        if (name, message) == (ours, str(error)):
            raise
        raise RequestError(error.status, error.code, message, param=name or None) from None


def fields_of(raw: bytes, limits: Limits) -> dict[str, object]:
    """The JSON object that a body is; halves of surrogate pairs are U+FFFD. Raises RequestError."""
    structure = json_structure(raw)
    if not structure.nests_within(limits.json_depth):
        raise RequestError(400, "invalid_json", f"The body is not JSON nested at most {limits.json_depth} deep.")
    # What is parsed in one piece holds up all other threads of Python meanwhile: this keeps it to tens of milliseconds.
    if structure.strings + structure.containers > limits.json_values:
        problem = f"The body has more than {limits.json_values} strings, names of fields among them, objects and arrays"
        raise RequestError(400, "too_many_values", f"{problem} (json_values in /limits). {SPREAD}")
    if structure.commas > (most := limits.prompt_tokens + limits.json_values):
        problem = f"The body has more than {most} values (prompt_tokens and json_values in /limits)"
        raise RequestError(400, "too_many_values", f"{problem}. {SPREAD}")
    try:
        fields = parsed(raw, partial(from_json, allow_inf_nan=False))
    except ValueError as error:
        raise RequestError(400, "invalid_json", f"The body is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", "The body must be a JSON object.")
    if count_names(fields, structure.containers) < structure.names:
        name = (repeated_name(raw) or "")[:100]
        problem = f"An object of the body has the field {name!r} twice, and programs differ in which they take."
        raise RequestError(400, "repeated_field", f"{problem} Send it once.", param=name)
    return fields


def refuse_unsupported(
    fields: dict[str, object],
    neutral: Mapping[str, tuple[object, ...]],
    instead: Mapping[str, str] = MappingProxyType({}),
    where: str = "",
) -> None:
    """Take out fields at values that ask for nothing; refuse other values by name, and say what to do instead.

    neutral: those values; a type stands for all values of it.
    """
    for name in [name for name in neutral if name in fields]:
        value = fields.pop(name)
        # `1 == True` in Python: the types must agree too.
        if not any(
            type(value) is allowed or (type(value) is type(allowed) and value == allowed) for allowed in neutral[name]
        ):
            remedy = f" {instead[name]}." if name in instead else ""
            message = f"{where}{name} is not supported.{remedy}"
            raise RequestError(400, "unsupported_parameter", message, param=where + name)


def typed(kind: type[AnyBody], fields: dict[str, object], where: str = "") -> AnyBody:
    """The fields as a body of that kind. Raises RequestError for the first field that it cannot have.

    where: the place of the fields in the request's body, for errors; empty: they are the body.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # The first problem is enough; the value is not repeated, so an error is never larger than its cause.
        raise _field_error(error, where) from None


def _field_error(error: ValidationError, where: str) -> RequestError:
    if error.error_count() > MAX_PROBLEMS:  # telling them apart would cost more than the request is worth
        return RequestError(400, "invalid_value", f"The body has more than {MAX_PROBLEMS} problems.")
    names = frozenset(_field_names(Body))
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    likeliest = _likeliest(problems, names)
    first = likeliest[0]
    path = [*([where] if where else []), *map(str, _place(first, names))]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:100]
        param = ".".join([*path, name] if name not in path else path)
        return RequestError(400, "unknown_parameter", f"Unknown field: {param}.", param=param)
    param = ".".join(path) or "body"
    if first["type"] == "missing":
        return RequestError(400, "missing_parameter", f"{param} is missing.", param=param)
    return invalid(param, _expectation(likeliest))


def _place(problem: ErrorDetails, names: frozenset[str]) -> list[int | str]:
    """Names of fields and positions in lists: unions put the form that was tried into the location too."""
    return [part for part in problem["loc"] if isinstance(part, int) or part in names]


def _likeliest(problems: Sequence[ErrorDetails], names: frozenset[str]) -> list[ErrorDetails]:
    """The problem to tell. Where a field may have several forms each has its problems: those of the form that got
    furthest into the value say most, and forms that got equally far are told together."""
    deepest = max(problems, key=lambda problem: len(problem["loc"]))
    loc = deepest["loc"]
    at = next((i for i, part in enumerate(loc) if not isinstance(part, int) and part not in names), len(loc))
    firsts: dict[int | str, ErrorDetails] = {}  # by form
    for problem in problems:
        if at < len(problem["loc"]) and problem["loc"][:at] == loc[:at]:
            firsts.setdefault(problem["loc"][at], problem)
    if not firsts:
        return [deepest]

    def progress(problem: ErrorDetails) -> tuple[int, list[int]]:
        place = _place(problem, names)
        return len(place), [part for part in place if isinstance(part, int)]

    furthest = max(map(progress, firsts.values()))
    equal = [problem for problem in firsts.values() if progress(problem) == furthest]
    # A form that the value has, with a problem of its own, comes before those that it does not have.
    return [each for each in equal if each["type"] not in _JSON_TYPES and each["type"] != "literal_error"][:1] or equal


def _expectation(problems: Sequence[ErrorDetails]) -> str:
    """What a value should be, one of several forms perhaps, in JSON's words."""
    message = problems[0]["msg"].rstrip(".")
    if len(problems) == 1 and problems[0]["type"] not in _JSON_TYPES:
        return message
    forms = [_JSON_TYPES.get(each["type"], each["msg"].removeprefix(_SHOULD_BE)) for each in problems]
    *rest, last = dict.fromkeys(forms)
    return f"{_SHOULD_BE}{', '.join(rest)}{' or ' if rest else ''}{last}"


def _field_names(kind: type[Body]) -> Iterator[str]:
    """Names of the fields of every kind of body there is, as bodies have them."""
    for each in kind.__subclasses__():
        yield from (field.alias or name for name, field in each.model_fields.items())
        yield from _field_names(each)


def within(field: str, value: int | None, least: int, most: int) -> None:
    """Raises RequestError for a number outside these bounds; None stands for a default."""
    if value is not None and not least <= value <= most:
        raise invalid(field, f"{value} is not within {least} and {most}")


def count_within(field: str, count: int, least: int, most: int) -> None:
    """Raises RequestError for a list with fewer or more items than these bounds."""
    if not least <= count <= most:
        raise invalid(field, f"has {count:,} items; from {least:,} to {most:,} are allowed")
