"""JSON schemas as llguidance holds answers to them: what it lets through is valid for the schema, by jsonschema."""

import json
import math
import random
import re

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Constraint
from roofline.engine.constraints import library
from roofline.engine.constraints.schemas import FORMATS, for_library, grammar_for_library

BYTES = llguidance.LLTokenizer("byte")
SPACES = frozenset(b" \n\r\t")
BIG = 2**53


def matcher_of(form):
    """A matcher over single bytes, of a schema or a constraint."""
    constraint = form if isinstance(form, Constraint) else Constraint.of_json_schema(form)
    return library.compiled(BYTES, library.notation(constraint))


def accepts(matcher, text):
    trial, data = matcher.deep_copy(), list(text.encode())
    return trial.try_consume_tokens(data) == len(data) and trial.is_accepting()


def written(matcher, seed, most=150):
    """An answer of a random model that writes no needless space; None where it did not end."""
    chance, walker, text = random.Random(seed), matcher.deep_copy(), bytearray()
    while not walker.is_stopped():
        bits = walker.compute_logit_bias()
        allowed = [token for token in range(256) if bits[token] and token not in SPACES]
        if walker.is_accepting() and (not allowed or chance.random() < 0.3):
            break
        if not allowed or len(text) > most:
            return None
        text.append(chance.choice(allowed))
        assert walker.consume_token(text[-1])
    return text.decode("utf-8", "replace")


def valid(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema)
    except (jsonschema.ValidationError, ValueError, OverflowError):
        return False
    return True


def numbers():
    return st.one_of(
        st.integers(-300, 300),
        st.integers(-(2**64), 2**64),
        st.integers(-5, 5).map(lambda step: BIG + step),
        st.integers(-5, 5).map(lambda step: 2**63 + step),
        st.floats(allow_nan=False, allow_infinity=False, min_value=-1e25, max_value=1e25),
        st.decimals(-1000, 1000, places=3).map(float),
        st.sampled_from([1.0, -0.0, 1e22, 1e23, 0.1, 0.30000000000000004, 5e-324, 1234567890123456789]),
    )


def around(number):
    """Texts of a number and of those beside it."""
    whole = int(number)
    near = {whole, whole - 1, whole + 1, int(float(number)), whole + 1024, whole - 1024}
    fractions = {float(number), math.nextafter(number, math.inf), math.nextafter(number, -math.inf)}
    return {*map(str, near), *(format(each, "f") for each in fractions), *map(repr, fractions)}


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers(), min_size=1, max_size=3), st.sampled_from(["enum", "const", "list", "object"]))
def test_numbers_of_enum_and_const_are_answered_unchanged_or_refused(values, kind):
    schema = {
        "enum": {"enum": values},
        "const": {"const": values[0]},
        "list": {"enum": [["x", *values], None]},
        "object": {"type": "object", "properties": {"a": {"const": {"b": values}}}, "required": ["a"]},
    }[kind]
    if kind == "object":
        schema["additionalProperties"] = False
    if any(number == int(number) and abs(number) > BIG for number in (values[:1] if kind == "const" else values)):
        with pytest.raises(ValueError, match="cannot be held exactly"):
            matcher_of(schema)
        return
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return  # a fraction of too many digits
    for seed in range(2):
        answer = written(matcher, seed, 900)
        assert answer is not None
        assert valid(answer, schema), (answer, schema)
    if kind in ("enum", "const"):
        for text in set().union(*map(around, values)):
            assert not accepts(matcher, text) or valid(text, schema), (text, schema)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        numbers(),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from(["integer", "number"]),
)
def test_bounds_let_no_number_through_that_they_exclude(bounds, kind):
    schema = {"type": kind, **bounds}
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return
    texts = {answer for seed in range(3) if (answer := written(matcher, seed, 60)) is not None}
    for text in texts.union(*map(around, bounds.values())):
        assert not accepts(matcher, text) or valid(text, schema), (text, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": -(2**63) - 1},
        {"type": "number", "maximum": 1e300},
        {"type": "number", "minimum": 0, "maximum": 0.30000000000000004},
        {"type": "number", "exclusiveMinimum": 5e-324},
        {"type": "integer", "minimum": -BIG, "maximum": BIG},
    ],
)
def test_bounds_of_wide_ranges_are_taken(schema):
    matcher = matcher_of(schema)
    answers = [answer for seed in range(20) if (answer := written(matcher, seed)) is not None]
    assert answers
    assert all(valid(answer, schema) for answer in answers)


def test_integers_up_to_two_to_the_53_are_bounds_to_the_last_one():
    matcher = matcher_of({"type": "integer", "minimum": -BIG, "maximum": BIG})
    assert [accepts(matcher, str(number)) for number in (BIG, BIG + 1, -BIG, -BIG - 1)] == [True, False, True, False]


REFUSED = [
    ({"properties": {"id": {"enum": ["x", 1234567890123456789]}}}, "properties.id.enum.1: 1234567890123456789"),
    ({"const": {"a": [0, 1e400]}}, "const.a.1: inf"),
    ({"$defs": {"n": {"const": 2**64}}, "$ref": "#/$defs/n"}, "$defs.n.const: 18446744073709551616"),
    ({"anyOf": [True, {"items": {"const": 0.30000000000000004}}]}, "anyOf.1.items.const: 0.30000000000000004"),
    (
        {"prefixItems": [{"type": "number", "minimum": 2**63}]},
        "prefixItems.0.minimum: 9223372036854775808 leaves no numbers that can be held exactly",
    ),
    ({"type": "number", "maximum": math.inf}, "maximum: it is no finite number"),
    ({"type": "number", "multipleOf": 0.07}, "multipleOf: 0.07 cannot be held exactly"),
    ({"allOf": [{"multipleOf": 100003}, {"multipleOf": 100019}]}, "multipleOf: several are combined"),
    ({"type": "object", "minProperties": 2}, "minProperties: 2 properties cannot be counted"),
    ({"components": {"n": {"const": 2**60 + 1}}, "$ref": "#/components/n"}, "components.n.const: 1152921504606846977"),
    ({"components": {"a/b": {"const": 2**60 + 1}}, "$ref": "#/components/a~1b"}, "components.a/b.const"),
]


@pytest.mark.parametrize(("schema", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_not_be_kept_is_refused_with_its_place(schema, problem):
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        matcher_of(Constraint("json_schema", json.dumps(schema)))
    assert str(caught.value).startswith(problem)
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        grammar_for_library(f'start: "%json {{" /%json "/ %json {json.dumps(schema)} // %json {{')
    assert str(caught.value).startswith(problem)


def test_numbers_that_are_no_constraints_are_left_alone():
    told = {"type": "integer", "default": 2**60 + 1, "examples": [2**60 + 1], "x-id": 2**60 + 1}
    assert for_library(told).items() >= told.items()


def test_formats_are_annotations_where_the_library_does_not_know_them_and_kept_where_it_does():
    for name in ("password", "uri-reference", "byte", "uuid4", "path", "int64", "json-string"):
        assert accepts(matcher_of({"type": "string", "format": name}), '"x y"'), name
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"format": name}))
        assert "Unknown format" in llguidance.LLMatcher(BYTES, text, log_level=0).get_error()
    for name in FORMATS:
        assert not accepts(matcher_of({"type": "string", "format": name}), '"x y"'), name


def test_what_asks_for_nothing_is_taken():
    assert accepts(matcher_of({"type": "array", "uniqueItems": False, "not": False}), "[1]")
    matcher = matcher_of({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}})
    assert (accepts(matcher, '{"b":null}'), accepts(matcher, '{"a":1}')) == (True, False)


def test_a_key_cannot_be_written_in_another_way_to_stand_for_another():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    matcher = matcher_of(schema)
    assert accepts(matcher, '{"a":1,"b":"x"}')
    for text in ('{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}'):
        assert not valid(text, schema)
        assert not accepts(matcher, text)


NAMES = [
    ({"propertyNames": {"type": "string"}}, '{"x":1}', None),
    ({"propertyNames": {"enum": ["a", "b"]}}, '{"a":1,"b":2}', '{"c":1}'),
    ({"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]}, '{"b":2}', '{"a":1}'),
    ({"propertyNames": {"enum": ["a"]}, "properties": {"a": {"type": "null"}, "b": {}}}, '{"a":null}', '{"b":1}'),
    ({"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}}, '{"xy":1}', '{"y":1}'),
]


@pytest.mark.parametrize(("keywords", "good", "bad"), NAMES, ids=range(len(NAMES)))
def test_names_of_properties_are_held_where_other_keywords_say_the_same(keywords, good, bad):
    schema = {"type": "object", **keywords}
    matcher = matcher_of(schema)
    assert valid(good, schema)
    assert accepts(matcher, good)
    assert bad is None or not (accepts(matcher, bad) or valid(bad, schema))
    for seed in range(5):
        answer = written(matcher, seed, 60)
        assert answer is None or valid(answer, schema)


@pytest.mark.parametrize(
    "keywords", [{"propertyNames": {"maxLength": 2}}, {"not": {"type": "null"}}, {"contains": {"type": "null"}}]
)
def test_keywords_that_the_library_does_not_have_are_refused_by_name(keywords):
    with pytest.raises(ValueError, match=next(iter(keywords))):
        matcher_of(keywords)


def test_schemas_within_grammars_have_the_bound_of_spaces_too():
    """And no options of theirs."""
    loose = '{"x-guidance": {"whitespace_pattern": " *"}, "type": "array", "items": {"type": "null"}}'
    for form in (Constraint.of_lark(f"start: %json {loose}"), Constraint("json_schema", loose)):
        matcher = matcher_of(form)
        assert accepts(matcher, "[" + " " * 64 + "null]")
        assert not accepts(matcher, "[" + " " * 65 + "null]")


def test_a_grammar_keeps_all_else():
    grammar = 'start: "%json {" /a"%json/ <a"b> # %json {\n x // "\nx: "//"'
    assert grammar_for_library(grammar) == grammar
    with pytest.raises(ValueError, match="%json is no JSON"):
        grammar_for_library("start: %json {")
    with pytest.raises(ValueError, match="nested more than 32"):
        grammar_for_library("start: %json " + '{"not": ' * 40 + "{}" + "}" * 40)
