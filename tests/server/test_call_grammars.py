"""Grammars of forced calls in every format: what they allow is read back as a call that its schema is valid for."""

import json
import re
from random import Random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Constraint
from roofline.common.errors import RequestError
from roofline.engine.constraints import library
from roofline.engine.keywords import _WORDS as WORDS_OF_VLLM
from roofline.server.call_grammars import forced_calls, optional_calls
from roofline.server.options import ServeOptions
from roofline.text.replies.formats.gemma_arguments import QUOTE
from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.formats.tagged import TaggedCalls
from roofline.text.replies.parser import Reply
from roofline.text.replies.reply_format import ReplyFormat

TAGGED = sorted(name for name, form in CALL_FORMATS.items() if issubclass(form, TaggedCalls))
TEXTS = [
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]+\\d$"},
    {"type": "string", "pattern": "^([xy]/|z)", "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "enum": ["a", "<b>", "5", "true"]},
    {"const": "on"},
    {"$ref": "#/$defs/unit"},
    {"allOf": [{"$ref": "#/$defs/unit"}], "description": "A unit."},
]
OTHERS = [
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": "number", "enum": [1.5, 2]},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/unit"}}, "required": ["a"], "additionalProperties": False},
    {"type": ["string", "null"], "maxLength": 2},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "maximum": 7, "minimum": 0}, {"type": "null"}]},
    {"enum": ["a", 1, None, "null", "1"]},
    {"type": ["integer", "string"], "minimum": 0, "maximum": 9, "maxLength": 2},
]
DEFINITIONS = {"unit": {"type": "string", "enum": ["C", "F"]}}
SCHEMAS = st.lists(st.sampled_from([*TEXTS, *OTHERS]), min_size=1, max_size=4).flatmap(
    lambda parts: st.builds(
        lambda required: {
            "type": "object",
            "properties": {f"k{number}": part for number, part in enumerate(parts)},
            "required": [f"k{number}" for number in required],
            "additionalProperties": False,
            "$defs": DEFINITIONS,
        },
        st.sets(st.integers(0, len(parts) - 1)),
    )
)


def tool(schema: dict, name: str = "f") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def written(grammar: str, seed: int, ends: list[bytes], begin: str = "") -> str:
    """A text of the grammar: random bytes that it allows, with a liking for what ends soon.

    ends: of values, which random bytes hardly are.
    """
    llguidance = pytest.importorskip("llguidance")
    random, text = Random(seed), bytearray(begin.encode())
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), library.notation(Constraint.of_lark(grammar)))
    assert not matcher.get_error(), matcher.get_error()
    assert matcher.consume_tokens(list(text))
    while not matcher.is_stopped():
        assert len(text) < 4_000
        for end in ends if random.random() < 0.3 else ():
            trial = matcher.deep_copy()
            if trial.try_consume_tokens(list(end)) == len(end):
                matcher = trial
                text += end
        mask = matcher.compute_logit_bias()
        allowed = [token for token in range(256) if mask[token]]
        if matcher.is_accepting() and (not allowed or random.random() < 0.3):
            break
        closing = [token for token in allowed if token in b'<"}]/>\n0x']
        token = random.choice(closing if closing and random.random() < 0.8 else allowed)
        assert matcher.consume_token(token)
        text.append(token)
    return text.decode("utf-8", "replace")


@pytest.mark.parametrize("form", CALL_FORMATS)
@settings(max_examples=8, deadline=None)
@given(SCHEMAS, st.integers(0, 99))
def test_a_forced_call_is_read_back_and_its_schema_is_valid_for_it(form, schema, seed):
    ends = [end.encode() for mark in getattr(CALL_FORMATS[form], "value_close", ()) for end in (mark, f"{mark}\n")]
    ends += [QUOTE.encode()] if form == "gemma" else []
    begin = CALL_FORMATS[form].frame.before if CALL_FORMATS[form].tells_reasoning else ""
    text = written(forced_calls(form, [tool(schema)], several=False, thinking=False).text, seed, ends, begin)
    reply, parser = Reply(), ReplyFormat(form, False, True).parser({"f": schema}, thinking=False)
    reply.add([*parser.push(text), *parser.finish()])
    assert (reply.text, [call.name for call in reply.calls]) == ("", ["f"]), text
    jsonschema.Draft202012Validator(schema).validate(json.loads(reply.calls[0].arguments))


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "refers to neither"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "hostname"}}}, "format 'hostname'"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|^b"}}}, "within it"),
        ({"type": "object", "properties": {"a<b": {"type": "string"}}}, "cannot write this name"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "none of the properties"),
    ],
)
def test_what_a_format_cannot_hold_calls_to_is_refused_by_name(form, schema, problem):
    with pytest.raises(RequestError, match=f"'f' cannot be kept to it.*{problem}"):
        forced_calls(form, [tool(schema)], several=False, thinking=False)


def test_the_option_names_every_format():
    assert set(WORDS_OF_VLLM["tool_call_parser"].values()) <= CALL_FORMATS.keys()
    for name in CALL_FORMATS:
        assert ServeOptions(tool_call_parser=name).reply_format("tools").calls == name


def takes(grammar: str, text: str) -> bool:
    """Whether an answer may be this text."""
    llguidance = pytest.importorskip("llguidance")
    matcher = library.compiled(llguidance.LLTokenizer("byte"), library.notation(Constraint.of_lark(grammar)))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


ONE = {
    **{"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", [name for name, calls in CALL_FORMATS.items() if calls.is_marked])
def test_where_calls_are_optional_text_is_free_and_a_strict_call_is_held_to_its_schema(form):
    calls, tools = CALL_FORMATS[form], [tool(ONE, "seek")]
    rules = optional_calls(form, tools, {"seek"}, several=True, thinking=False, thoughts=calls.thoughts).text
    before = calls.text_before if calls.tells_reasoning else ""
    begin = calls.frame.before if calls.tells_reasoning else ""
    call = written(forced_calls(form, tools, several=False, thinking=False).text, 3, [], begin)
    for text in ("", "Hello {", "a < b"):
        assert takes(rules, before + text), text
        assert calls.tells_reasoning or takes(rules, text + call), text
    assert takes(rules, call)
    assert not takes(rules, call.replace("count", "size"))
    assert not takes(rules, call.replace("seek", "find"))
    thoughts = f"Hm {{{calls.thoughts.close}" + (calls.message_head if calls.tells_reasoning else "")
    thinking = optional_calls(form, tools, {"seek"}, several=True, thinking=True, thoughts=calls.thoughts).text
    assert takes(thinking, thoughts + call)
    assert not takes(thinking, "Hm {")


@pytest.mark.parametrize("form", sorted(CALL_FORMATS.keys() - {"json", "llama3", "dsml", "dsml_v4"}))
def test_marks_of_a_forced_call_may_be_special_tokens(form):
    calls, tools = CALL_FORMATS[form], [tool({"type": "object", "properties": {}})]
    ids = {mark: 256 + number for number, mark in enumerate(dict.fromkeys((*calls.marks, calls.thoughts.close)))}
    words = library.Words(
        [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in ids), b"</s>"],
        [*ids.values(), 256 + len(ids)],
        [256 + len(ids)],
    )
    begin = calls.frame.before if calls.tells_reasoning else ""
    call = written(forced_calls(form, tools, several=False, thinking=False).text, 1, [], begin)
    rules = forced_calls(form, tools, several=False, thinking=True, thoughts=calls.thoughts, special_ids=ids)
    text = f"Hm.{calls.thoughts.close}{calls.message_head if calls.tells_reasoning else ''}{call}"
    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    tokens = [
        token for part in re.split(f"({pattern})", text) for token in ([ids[part]] if part in ids else part.encode())
    ]
    for spelling in (tokens, list(text.encode())):
        matcher = library.compiled(library.library_tokenizer(words), library.notation(rules))
        assert matcher.try_consume_tokens(spelling) == len(spelling)
        assert matcher.is_accepting()
