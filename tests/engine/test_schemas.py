"""JSON schemas as llguidance holds answers to them: what it lets through is valid for the schema, by jsonschema."""

import json
import math
import random
import re
from datetime import date, datetime

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Constraint
from roofline.engine.constraints import library
from roofline.engine.constraints.digits import integers
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
def test_numbers_of_enum_and_const_are_answered_unchanged(values, kind):
    schema = {
        "enum": {"enum": values},
        "const": {"const": values[0]},
        "list": {"enum": [["x", *values], None]},
        "object": {"type": "object", "properties": {"a": {"const": {"b": values}}}, "required": ["a"]},
    }[kind]
    if kind == "object":
        schema["additionalProperties"] = False
    matcher = matcher_of(schema)
    for seed in range(2):
        answer = written(matcher, seed, 900)
        assert answer is not None
        assert valid(answer, schema), (answer, schema)
    if kind in ("enum", "const"):
        for text in set().union(*map(around, values)):
            assert not accepts(matcher, text) or valid(text, schema), (text, schema)


WIDE = 1234567890123456789
WRITTEN_OUT = [
    ({"enum": [WIDE, "x"]}, [f"{WIDE}", '"x"'], ["1234567890123456768", "123456789012345678", '"y"']),
    ({"type": "integer", "enum": [WIDE, "x"]}, [f"{WIDE}"], ['"x"']),
    ({"const": BIG + 1}, [f"{BIG + 1}"], [f"{BIG}"]),
    ({"const": 0.30000000000000004}, ["0.30000000000000004"], ["0.3"]),
    (
        {
            "type": "object",
            "properties": {
                "id": {"enum": [WIDE, WIDE + 1], "description": "Which."},
                "n": {"type": "string", "maxLength": 3},
                "o": {"const": -WIDE},
            },
            "required": ["id"],
            "additionalProperties": False,
        },
        [f'{{"id": {WIDE}}}', f'{{ "id":{WIDE + 1} , "n":"abc" }}', f'{{"id":{WIDE},"o":-{WIDE}}}'],
        ['{"n":"a"}', '{"id":1234567890123456768}', f'{{"id":{WIDE},}}', "{}", f'{{{" " * 65}"id":{WIDE}}}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "id": {"const": WIDE}}},
        ["{}", "{ }", '{"a":1}', f'{{"id":{WIDE}}}', f'{{"a":-5,"id":{WIDE}}}'],
        ["{,}", '{"id":1}'],
    ),
    (
        {
            "$defs": {
                "Id": {"enum": [WIDE], "type": "integer"},
                "S": {"type": "object", "properties": {"s": {"$ref": "#/$defs/T"}}, "additionalProperties": False},
                "T": {"type": "string", "maxLength": 2},
            },
            **{"type": "array", "minItems": 1, "maxItems": 3},
            "items": {"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}, {"$ref": "#/$defs/S"}]},
        },
        [f"[{WIDE}]", f"[null, {WIDE}]", f'[{{"s":"ab"}},null,{WIDE}]'],
        ["[]", "[1]", "[null,null,null,null]", '[{"s":"abc"}]'],
    ),
    ({"type": "integer", "minimum": 2**63}, [f"{2**63}", f"{2**70}"], [f"{2**63 - 1}", "1"]),
    (
        {"type": "integer", "exclusiveMinimum": 2**63, "maximum": 2**64},
        [f"{2**63 + 1}", f"{2**64}"],
        [f"{2**63}", f"{2**64 + 1}"],
    ),
    (
        {"type": "integer", "minimum": 1234567890123456000, "maximum": 1234567890123456999},
        ["1234567890123456000", "1234567890123456789", "1234567890123456999"],
        ["1234567890123455999", "1234567890123457000", "1234567890123456e3"],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer", "exclusiveMinimum": 2**60, "maximum": 2**60 + 1}}},
        [json.dumps({"a": 2**60 + 1})],
        [json.dumps({"a": 2**60}), json.dumps({"a": 2**60 + 2})],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), WRITTEN_OUT, ids=range(len(WRITTEN_OUT)))
def test_numbers_that_no_float_holds_are_answered_digit_by_digit(schema, good, bad):
    """In a schema of its own, and twice in a grammar, as parameters of tools are."""
    text = json.dumps(schema)
    alone = matcher_of(schema)
    twice = matcher_of(Constraint.of_lark(f'start: "<" %json {text} ">" again\nagain: %json {text}'))
    for answer in good:
        assert valid(answer, schema)
        assert accepts(alone, answer), answer
        assert accepts(twice, f"<{answer}>{answer}"), answer
    for answer in bad:
        assert not accepts(alone, answer), answer
    for seed in range(20):
        answer = written(alone, seed, 300)
        assert answer is None or valid(answer, schema), answer


@given(st.one_of(st.none(), st.integers(-1200, 1200)), st.one_of(st.none(), st.integers(-1200, 1200)))
def test_integers_between_bounds_are_those_that_their_pattern_matches(first, second):
    least, most = (second, first) if None not in (first, second) and first > second else (first, second)
    pattern = re.compile(integers(least, most))
    for number in range(-1300, 1300):
        within = (least is None or number >= least) and (most is None or number <= most)
        assert bool(pattern.fullmatch(str(number))) == within, number
    assert not any(pattern.fullmatch(text) for text in ("01", "-0", "00", "-01", "", "-"))


def test_definitions_that_lead_to_each_other_again_and_again_are_written_once():
    named = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)}
    schema = {"$defs": named | {"a25": {"const": WIDE}}, "$ref": "#/$defs/a0"}
    assert accepts(matcher_of(schema), f"{WIDE}")
    assert len(library.notation(Constraint.of_json_schema(schema))) < 5000


DATES = ["0001-01-01", "0000-01-01", "2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "2023-04-31", "2023-12-31"]
DATES += ["2023-00-10", "2023-13-10", "2023-10-00", "9999-12-31", "2023-11-31", "2023-02-28", "2023-1-01", "2100-02-29"]
TIMES = ["00:00:00Z", "23:59:59.123456+01:00", "24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00-23:59"]


@pytest.mark.parametrize("beside", [{}, {"pattern": "^2"}])
def test_days_are_those_of_the_calendar(beside):
    """Python's calendar is the judge, and jsonschema's, which asks it."""
    matcher = matcher_of({"type": "string", "format": "date", **beside})
    moments = matcher_of({"type": "string", "format": "date-time"})
    for day in DATES:
        try:
            date.fromisoformat(day)
            real = True
        except ValueError:
            real = False
        assert jsonschema.FormatChecker().conforms(day, "date") == real
        assert accepts(matcher, f'"{day}"') == (real and (not beside or day.startswith("2"))), day
        assert accepts(moments, f'"{day}T12:00:00Z"') == real, day


def test_times_have_hours_minutes_and_seconds_that_a_day_has_and_an_offset():
    matcher = matcher_of({"format": "time"})
    moments = matcher_of({"format": "date-time"})
    for text in TIMES:
        try:
            real = datetime.fromisoformat(f"2024-02-29T{text}").tzinfo is not None
        except ValueError:
            real = False
        assert accepts(matcher, f'"{text}"') == real, text
        assert accepts(moments, f'"2024-02-29T{text}"') == real, text


@pytest.mark.parametrize("value", [-1, 0, -0.5, "2", None, True])
def test_a_multiple_of_nothing_is_refused_with_its_place(value):
    with pytest.raises(ValueError, match=r"^properties\.n\.multipleOf: it must be a number above 0$"):
        matcher_of({"properties": {"n": {"type": "integer", "multipleOf": value}}})


@pytest.mark.parametrize("key", ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"])
def test_counts_are_whole_numbers(key):
    for value in (-1, 1.5, "1", True, None):
        with pytest.raises(ValueError, match=rf"^items\.{key}: it must be a whole number, 0 or more$"):
            matcher_of({"items": {key: value}})
    matcher_of({"items": {key: 1.0}})


@pytest.mark.parametrize("parts", [[{"type": "string"}, {"maxLength": 3}], [{"type": "number"}, {"type": "integer"}]])
def test_parts_of_which_several_may_be_valid_are_refused_with_what_to_do_instead(parts):
    with pytest.raises(ValueError, match=r"^oneOf: several of its parts .* use anyOf") as caught:
        matcher_of({"oneOf": parts})
    assert "coerce" not in str(caught.value)


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
    (
        {"allOf": [{"type": "integer", "minimum": 1234567890123456000, "maximum": 1234567890123456999}]},
        "allOf.0.minimum: bounds of more than 15 digits are held a little within",
    ),
    (
        {
            "properties": {
                "a": {"type": "number", "exclusiveMinimum": 0.12345678901234561, "maximum": 0.1234567890123457}
            }
        },
        "properties.a.exclusiveMinimum: bounds of more than 15 digits are held a little within",
    ),
    ({"properties": {"a": {"type": "integer", "multipleOf": 12345678}}}, "properties.a.multipleOf: 12345678 takes too"),
    ({"items": {"maxLenght": 5}}, "items.maxLenght: is no keyword of JSON Schema; 'maxLength' is"),
    ({"anyOf": [{"type": "string", "additionalproperties": False}]}, "anyOf.0.additionalproperties: is no keyword"),
    ({"properties": {"id": {"enum": ["x", 1234567890123456789]}}}, "properties.id.enum.1: 1234567890123456789"),
    ({"const": {"a": [0, 1e400]}}, "const.a.1: inf"),
    ({"$defs": {"n": {"const": 2**64}}, "allOf": [{"$ref": "#/$defs/n"}]}, "$defs.n.const: 18446744073709551616"),
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


def test_what_is_near_to_no_keyword_is_an_annotation():
    told = {"type": "integer", "propertyOrdering": ["a"], "enumNames": ["a"], "bogus": 1, "x-typ": 1}
    assert for_library(told).items() >= told.items()
    assert for_library({"definition": {"n": {"type": "null"}}, "$ref": "#/definition/n"}), "a reference leads into it"


@pytest.mark.parametrize("factor", [1, 7, 50021, 65536, 10**8, 0.001, 12.5])
def test_multiples_that_take_little_are_held(factor):
    matcher = matcher_of({"type": "number", "multipleOf": factor})
    assert accepts(matcher, f"{3 * factor:f}".rstrip("0").rstrip(".") if factor % 1 else str(3 * int(factor)))


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
