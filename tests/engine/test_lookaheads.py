"""Patterns that look ahead and those that are written for them: they find something in the same texts, by `re`."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schemas import accepts, matcher_of, valid, written

from roofline.engine.constraints.lookaheads import MOST_PATTERNS, Patterns, without_lookaheads
from roofline.engine.constraints.schemas import check, for_library, grammar_for_library

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # Pydantic's
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
PATTERNS = {
    DECIMAL: "+-.012",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)$": "+-.012",  # max_digits, decimal_places
    EMAIL: "a.@-",
    r"^(?!(?:ab|ba)$)[ab]+$": "ab",
    r"^(?=.*a)(?=.*b)[abc]{2,4}$": "abc",
    r"^(?!a)": "ab\n",
    r"a(?!b)": "abc\n",
    r"(?=ab)a.|c(?!.*\.)": "abc.",
    r"^(?!.*(?!a)b)[ab]*$": "ab",
    r"^x(?!\s)\S?[^\w.]{0,2}$": "x .é-\t",
}
LETTERS = {pattern: st.text(alphabet=letters, max_size=9) for pattern, letters in PATTERNS.items()}


@pytest.fixture(scope="module")
def rewritten():
    """Each pattern, and what is written for it as Python's `re` spells it."""
    return {
        pattern: re.compile(
            re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", without_lookaheads(pattern))[:-1]
            + r"\Z"
        )
        for pattern in PATTERNS
    }


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_written_finds_something_in_the_same_texts(rewritten, pattern, data):
    text = data.draw(LETTERS[pattern])
    if not (text.endswith("\n") and "$" in pattern):  # where dialects differ
        assert bool(rewritten[pattern].search(text)) == bool(re.search(pattern, text, re.ASCII))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (DECIMAL, ["1", "-0.5", ".5", ""], ["+", "-.", "1.2.3"]),
        (EMAIL, ["a@b.co", "a.b@c.de"], [".a@b.co", "a..b@c.de", "a@b"]),
        ("^(?!a)[ab]+$", ["b", "ba"], ["a", "ab"]),
    ],
)
def test_answers_are_held_to_what_looks_ahead(pattern, good, bad):
    schema = {"type": "string", "pattern": pattern}
    matcher = matcher_of(schema)
    for text in good:
        if valid(json.dumps(text), schema):
            assert accepts(matcher, json.dumps(text)), text
    assert not any(accepts(matcher, json.dumps(text)) for text in bad)
    for seed in range(6):
        answer = written(matcher, seed)
        assert answer is None or valid(answer, schema)


def test_names_of_properties_may_look_ahead():
    integers = {"type": "integer"}
    for keywords in (
        {"patternProperties": {"^(?!a)": integers}, "additionalProperties": False},
        {"propertyNames": {"pattern": "^(?!a)"}, "additionalProperties": integers},
    ):
        matcher = matcher_of({"type": "object", **keywords})
        assert [accepts(matcher, text) for text in ('{"b":1}', '{"a":1}', '{"b":""}')] == [True, False, False]


REFUSED = [
    ("^(?!a)(?:(?:x{0,64}){0,64}){0,64}$", "too complex"),
    ("^(?!.*a.{12}b)(a|b)*$", "too complex"),
    ("^(?!a)" + "(" * 900 + "a" + ")" * 900, "too complex"),
    ("^(?!a)(?:a(?=b)b)*$", "within what is repeated"),
    ("^(?!a)x{65}$", "repeats at most 64"),
    ("^(?!a)b^", "no other places"),
    (r"^(?!a)b\b", "no other places"),
    ("^(?!a)(?<=b)", "looks back"),
    (r"^(?!a)(b)\1", "not supported"),
    ("^(?!a)(?i:b)", "flags"),
    ("(?i)^(?!a)b", "flags"),
    ("^(?!", "cannot be read"),
    ("^(?!a)a$", "nothing satisfies"),
]


@pytest.mark.parametrize(("pattern", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_written_is_refused_with_its_place(pattern, problem):
    schema = {"properties": {"p": {"pattern": pattern}}}
    with pytest.raises(ValueError, match=rf"^properties\.p\.pattern: .*{problem}"):
        for_library(schema)
    check(schema)  # which leaves patterns alone


def test_a_form_has_few_of_them():
    patterns = Patterns()
    for _ in range(2):  # the same ones do not count again
        for number in range(MOST_PATTERNS):
            patterns.of(f"^(?!{number})")
    assert patterns.of("a") == "a"
    with pytest.raises(ValueError, match="more than 8 patterns"):
        patterns.of("^(?!x)")
    schemas = "".join(f' %json {{"pattern": "^(?!{number})"}}' for number in range(MOST_PATTERNS + 1))
    with pytest.raises(ValueError, match="more than 8 patterns"):
        grammar_for_library(f"start:{schemas}")
