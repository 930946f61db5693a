"""Forms of answers as APIs write them -> constraints. Fields that are unknown are refused by name, as everywhere."""

from collections.abc import Collection, Mapping

from roofline.common.errors import RequestError
from roofline.engine.constraint import Constraint
from roofline.server.body import invalid, renamed

SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def response_format(value: Mapping[str, object] | None) -> Constraint | None:
    """OpenAI's `response_format`. A schema is kept to whether `strict` is said or not."""
    if value is None:
        return None
    kind = value.get("type")
    if kind in ("text", "json_object"):
        _refuse_unknown("response_format", value, {"type"})
        return Constraint.of_json() if kind == "json_object" else None
    if kind != "json_schema":
        raise invalid("response_format.type", "must be one of text, json_object, json_schema")
    _refuse_unknown("response_format", value, {"type", "json_schema"})
    form = value.get("json_schema")
    if not isinstance(form, dict) or "schema" not in form:
        raise RequestError(
            400, "missing_parameter", "response_format.json_schema.schema is missing.", "response_format.json_schema"
        )
    _refuse_unknown("response_format.json_schema", form, SCHEMA_FIELDS)
    for name, kinds in (("name", str), ("description", str), ("strict", bool)):
        if form.get(name) is not None and not isinstance(form[name], kinds):
            raise invalid(f"response_format.json_schema.{name}", "has another type")
    return schema("response_format.json_schema.schema", form["schema"])


def schema(field: str, value: object) -> Constraint:
    """The constraint of a JSON schema in a body. field: its name, for errors."""
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON schema, which is an object")
    with renamed({"constraint": field}):
        return Constraint.of_json_schema(value)


def _refuse_unknown(field: str, value: Mapping[str, object], known: Collection[str]) -> None:
    for name in value:
        if name not in known:
            where = f"{field}.{name[:100]}"
            raise RequestError(400, "unknown_parameter", f"Unknown field: {where}.", param=where)
