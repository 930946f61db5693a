"""Answers held to a form: over random models they have it, alone and in company, and what goes wrong stays alone."""

import json
import random
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from engine_fakes import FakeExecutable, QueueingFake, ResamplingFake, SpellingTokenizer, check_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline import Constraint, SamplingParams
from roofline.common.errors import ConfigError, RequestError
from roofline.engine.config import EngineConfig
from roofline.engine.constraints import grammars, library, masks
from roofline.engine.constraints.matcher import Matcher
from roofline.engine.constraints.schemas import JSON_SPACE
from roofline.engine.constraints.vetting import Vetting
from roofline.engine.events import Event
from roofline.engine.local import LocalEngine

TOKENIZER = SpellingTokenizer()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
KINDS = [
    Constraint.of_json(),
    Constraint.of_json_schema(PERSON),
    Constraint.of_regex(r"[A-Za-z]{2,5}( [0-9é]+)*"),
    Constraint.of_regex("(?s:.*)"),
    Constraint.of_choice(["ab", "abc", "b!"]),
    Constraint.of_lark('start: "(" start ")" | /[a-z]+/'),
]
SIZES = {"vocab_size": 300, "num_pages": 400, "max_context": 3000, "table_pages": 2000}


def engine_of(weights=0, kind=FakeExecutable, config=None, **sizes):
    return LocalEngine(kind(weights=weights, **{**SIZES, **sizes}), config, None, lambda: TOKENIZER)


@pytest.fixture(scope="module")
def warm():
    """An engine for tests that need nothing special of theirs: the vocabulary's tables are made once."""
    engine = engine_of()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def same_model(warm):
    """What a test of random models left."""
    warm.executable.weights = FakeExecutable().weights


def answers(engine, requests):
    """{name: (ids, last event)} of requests {name: (prompt, params)}, all at once."""
    for name, (prompt, params) in requests.items():
        engine.submit(prompt, params, eos_ids=TOKENIZER.eos_ids, request_id=name)
    ids, last = {}, {}
    while engine.has_work:
        for event in engine.step():
            key = (event.request_id, event.index)
            assert key not in last, "an event after the last"
            ids.setdefault(key, []).extend(event.ids)
            if event.finish_reason is not None:
                last[key] = event
    check_pages(engine.state.cache, [])
    return {name: (ids[name, 0], last[name, 0]) for name in requests}


def text_of(ids):
    return b"".join(TOKENIZER.token_bytes(token) for token in ids if token < 270).decode()


def leaf():
    limits = st.integers(0, 4)
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'a"b'}, {"enum": [1, "x", None]}]),
        st.builds(
            lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more}, limits, limits
        ),
        st.builds(
            lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, limits, st.integers(0, 99)
        ),
    )


def schemas():
    names = st.sampled_from(["a", "bé", "c d", 'q"', "n"])

    def containers(inner):
        fields = st.dictionaries(names, inner, max_size=3)
        objects = st.builds(
            lambda fields, optional: {
                "type": "object",
                "properties": fields,
                "required": [name for i, name in enumerate(fields) if i >= optional],
                "additionalProperties": False,
            },
            fields,
            st.integers(0, 2),
        )
        lists = st.builds(
            lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)
        )
        return st.one_of(objects, lists, st.builds(lambda *each: {"anyOf": list(each)}, inner, inner))

    return st.recursive(leaf(), containers, max_leaves=5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schemas(), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_answers_of_random_models_are_valid_for_random_schemas(warm, schema, weights, temperature):
    warm.executable.weights = warm.executable.weights.__class__(weights)
    # A model that knows nothing of whitespace would write it for ever so long: here only what JSON needs.
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=900,
        guided_json=schema,
        logit_bias=dict.fromkeys((9, 10, 13, 32), -100),
    )
    ((ids, last),) = answers(warm, {"r": ([1, 2, 3], params)}).values()
    assert last.finish_reason == "stop", text_of(ids)
    jsonschema.validate(json.loads(text_of(ids)), schema)


@pytest.mark.parametrize(
    "regex",
    [r"[a-c]{2,5}(-\d+x)?", r"^(ja|nein)\.$", r"a/b \$\d", r"([01]\d|2[0-3]):[0-5]\d", "é{2}|ü+z", "[A-Za-z]{3}"],
)
def test_answers_match_the_regex_from_beginning_to_end(warm, regex):
    requests = {
        str(seed): ([seed + 1], SamplingParams(seed=seed, max_tokens=300, guided_regex=regex)) for seed in range(4)
    }
    for ids, last in answers(warm, requests).values():
        assert last.finish_reason == "stop"
        assert re.fullmatch(regex, text_of(ids))


def test_answers_are_one_of_the_choices_and_each_can_be(warm):
    choices = ["yes", "no", 'a.b/c\n"{} ü', "(x|y)*\\d", "yes, of course", "ab"]
    requests = {
        str(seed): ([7], SamplingParams(seed=seed, temperature=3, max_tokens=99, guided_choice=choices))
        for seed in range(40)
    }
    texts = {text_of(ids) for ids, last in answers(warm, requests).values() if last.finish_reason == "stop"}
    assert len(texts) >= 4
    assert texts <= set(choices)


def test_a_lark_grammar_and_any_json_object(warm):
    grammar = 'start: "<" word ("," word){0,3} ">"\nword: /[a-z]{1,3}/'
    bias = dict.fromkeys((9, 10, 13, 32), -100) | {ord("}"): 20, ord('"'): 40}
    requests = {
        "lark": ([5], SamplingParams(seed=1, max_tokens=99, guided_grammar=grammar)),
        "json": ([5], SamplingParams(seed=1, max_tokens=900, constraint=Constraint.of_json(), logit_bias=bias)),
    }
    results = answers(warm, requests)
    assert re.fullmatch("<[a-z]{1,3}(,[a-z]{1,3}){0,3}>", text_of(results["lark"][0]))
    assert isinstance(json.loads(text_of(results["json"][0])), dict)
    assert {last.finish_reason for _, last in results.values()} == {"stop"}


def mixed():
    """Forms of each kind beside free text, with everything that sampling has."""
    forms = [
        {"guided_json": PERSON}, {}, {"guided_regex": "[a-f]+[0-9]{9}"}, {"guided_choice": ["yes", "no"]},
        {"guided_json": PERSON, "logprobs": 2}, {"repetition_penalty": 1.2}, {"guided_regex": "x{30}"},
        {"guided_grammar": 'start: "a"{4} | "b" start', "top_k": 9, "presence_penalty": 0.3},
    ]  # fmt: skip
    return {
        str(i): (
            [i + 1] * (i % 5 * 9 + 1),
            SamplingParams(seed=i, temperature=i % 3 / 2, max_tokens=40 + i, **forms[i % len(forms)]),
        )
        for i in range(12)
    }


@pytest.mark.parametrize(
    ("kind", "config", "sizes"),
    [
        pytest.param(FakeExecutable, {}, {}, marks=pytest.mark.slow),
        pytest.param(QueueingFake, {}, {}, marks=pytest.mark.slow),
        pytest.param(ResamplingFake, {}, {}, marks=pytest.mark.slow),
        (ResamplingFake, {"max_running": 5}, {"num_pages": 14, "max_context": 200}),
        pytest.param(FakeExecutable, {"max_batch_tokens": 16, "prefix_cache": False}, {}, marks=pytest.mark.slow),
        (FakeExecutable, {"speculate": "ngram", "speculate_always": True}, {"rows": 60, "segments": 12}),
        (QueueingFake, {"max_running": 5}, {"num_pages": 14, "max_context": 200}),
    ],
)
def test_the_same_request_gives_the_same_ids_in_any_batch(warm, kind, config, sizes):
    requests = mixed()
    engine = engine_of(kind=kind, config=EngineConfig(**config), **sizes)
    try:
        if "num_pages" in sizes:  # else free text may have ended before the forms are compiled, and the cache suffices
            for constraint in {params.constraint for _, params in requests.values() if params.constraint is not None}:
                engine.compile(constraint).result()
        together = answers(engine, requests)
        stats = engine.stats()
    finally:
        engine.close()
    if "num_pages" in sizes:
        assert stats.preemptions > 0, "the cache was large enough for all"
    for name, request in requests.items():
        ids, last = answers(warm, {name: request})[name]
        assert together[name][0] == ids
        assert together[name][1].finish_reason == last.finish_reason
    assert {last.finish_reason for _, last in together.values()} == {"stop", "length"}


@pytest.mark.parametrize("after", [1, 3, 8, 20])
def test_an_answer_that_another_engine_began_goes_on_as_it_would_have(warm, after):
    for name, (prompt, params) in mixed().items():
        ids, last = answers(warm, {name: (prompt, params)})[name]
        if params.constraint is None or len(ids) <= after:
            continue
        warm.submit(prompt, params, {0: ids[:after]}, eos_ids=TOKENIZER.eos_ids, request_id="again")
        events = []
        while warm.has_work:
            events += warm.step()
        assert [token for event in events for token in event.ids] == ids[after:]
        assert (events[-1].finish_reason, events[-1].stop_id) == (last.finish_reason, last.stop_id)


def test_forced_runs_are_found_again_where_another_engine_goes_on(monkeypatch):
    """The ids of a text that is forced may depend on where one looks: long ones are pairs here, short ones letters."""
    pair = TOKENIZER.tokens.index(b"ab")
    monkeypatch.setattr(
        SpellingTokenizer,
        "encode",
        lambda _, text, **__: (
            [pair] * text.count("ab") + [33] * text.count("!") if len(text) >= 6 else [*text.encode()]
        ),
    )
    engine = engine_of()
    params = SamplingParams(temperature=0, max_tokens=50, guided_choice=["ab" * 9 + "!"])
    ids, _ = answers(engine, {"r": ([5], params)})["r"]
    assert text_of(ids) == "ab" * 9 + "!"
    assert pair in ids
    for after in range(1, len(ids)):
        engine.submit([5], params, {0: ids[:after]}, eos_ids=TOKENIZER.eos_ids)
        rest = []
        while engine.has_work:
            rest += [token for event in engine.step() for token in event.ids]
        assert rest == ids[after:]
    engine.close()


LOGPROBS = {"logprobs": 3}
CONTROLS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.7, "logit_bias": {97: 6.0, 98: -100.0}},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 0.8, "min_tokens": 6},
    {"temperature": 0.8, "ignore_eos": True},
    {"temperature": 0, "prompt_logprobs": 1},
]


def test_ids_that_are_looked_at_afterwards_are_those_that_masks_allow(warm):
    """Whatever shapes the choice: masks before it and a second choice where its form refuses the first are the same."""
    forms = [
        {"guided_regex": "[a-m]{3,12}"},
        {"constraint": Constraint.of_json_schema(PERSON)},
        {"guided_regex": ".+"},
        {"guided_choice": ["abcabcabc", "xyz"]},
    ]
    requests = {
        f"{form} {controls}": (
            [7, form, at],
            SamplingParams(seed=at, max_tokens=20, **LOGPROBS, **controls, **forms[form]),
        )
        for form in range(len(forms))
        for at, controls in enumerate(CONTROLS)
    }
    engine = engine_of(kind=ResamplingFake, rows=64, segments=32)
    try:
        together = answers(engine, requests)
        resampled = engine.executable.resampled
    finally:
        engine.close()
    alone = answers(warm, requests)
    assert {name: ids for name, (ids, _) in together.items()} == {name: ids for name, (ids, _) in alone.items()}
    assert {name: last.finish_reason for name, (_, last) in together.items()} == {
        name: last.finish_reason for name, (_, last) in alone.items()
    }
    generated = sum(len(ids) for ids, _ in together.values())
    assert 0 < resampled < generated, "some ids are refused, and some are not"


def test_an_id_is_allowed_where_its_bit_is_set(warm):
    """For each id of the vocabulary, along walks through each kind of form."""
    words = -(-SIZES["vocab_size"] // 32)
    chance = random.Random(0)
    for constraint in KINDS:
        grammar = warm.compile(constraint).result()
        for min_tokens, ignore_eos in [(0, False), (3, False), (0, True)]:
            for _ in range(4):
                matcher = grammar.matcher([70], min_tokens, ignore_eos)
                for _ in range(16):
                    mask = np.zeros(words, np.uint32)
                    matcher.fill(mask)
                    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: SIZES["vocab_size"]]
                    own = [matcher.allows(token) for token in range(SIZES["vocab_size"])]
                    unsure = {*TOKENIZER.eos_ids, 70}  # False there only asks for the mask
                    assert [t for t in range(len(own)) if own[t] != bits[t] and (own[t] or t not in unsure)] == []
                    if matcher.take(int(chance.choice(np.flatnonzero(bits)))) is not None:
                        break


def test_free_text_is_the_same_beside_forms_and_forms_are_not_drafted_for(warm):
    free = {name: request for name, request in mixed().items() if request[1].constraint is None}
    assert {name: ids for name, (ids, _) in answers(warm, free).items()} == {
        name: ids for name, (ids, _) in answers(warm, mixed()).items() if name in free
    }
    engine = engine_of(config=EngineConfig(speculate="ngram", speculate_always=True), rows=60)
    answers(engine, {"r": ([1, 2] * 9, SamplingParams(temperature=0, max_tokens=60, guided_regex="(ab)+"))})
    assert engine.stats().draft_tokens == 0
    engine.close()


def test_each_of_n_answers_has_a_place_of_its_own(warm):
    params = SamplingParams(seed=3, n=4, temperature=2, max_tokens=200, guided_regex="[a-z]{8}")
    warm.submit([4, 5], params, eos_ids=TOKENIZER.eos_ids, request_id="n")
    ids = {}
    while warm.has_work:
        for event in warm.step():
            ids.setdefault(event.index, []).extend(event.ids)
    assert len({text_of(each) for each in ids.values()}) == 4
    assert all(re.fullmatch("[a-z]{8}", text_of(each)) for each in ids.values())


def test_an_answer_ends_when_it_is_complete_whatever_else_is_asked(warm):
    """A complete form goes before min_tokens and ignore_eos; one that can go on does."""
    run = lambda **params: answers(warm, {"r": ([9], SamplingParams(seed=5, max_tokens=30, **params))})["r"]  # noqa: E731
    for extra in ({}, {"min_tokens": 20}, {"ignore_eos": True}):
        ids, last = run(guided_choice=["stop"], **extra)
        assert (text_of(ids), last.finish_reason, last.stop_id) == ("stop", "stop", None)
    ids, last = run(guided_regex="a+")
    assert (last.finish_reason, last.stop_id, len(ids) < 25) == ("stop", 270, True)
    ids, last = run(guided_regex="a+", min_tokens=25)
    assert last.finish_reason in ("stop", "length")
    assert len(ids) >= 25
    ids, last = run(guided_regex="a+", ignore_eos=True)
    assert (last.finish_reason, len(ids), 270 in ids) == ("length", 30, False)
    ids, last = run(guided_regex="sto[pP]", min_tokens=20, stop_token_ids=[ord("p"), ord("P")])
    assert (text_of(ids).lower(), last.finish_reason, last.stop_id) == ("stop", "stop", ids[-1])
    ids, last = run(guided_regex="a{40}")
    assert last.finish_reason == "length", "a form that is not complete where max_tokens are is cut off"


@pytest.mark.parametrize("constraint", KINDS, ids=range(len(KINDS)))
def test_an_answer_and_the_beginning_that_it_goes_on_from_have_the_form_together(warm, constraint):
    def answered(form, seed):
        warm.compile(form).result()
        params = SamplingParams(seed=seed, max_tokens=150, constraint=form)
        ids, last = answers(warm, {"r": ([1, 2, 3], params)})["r"]
        return b"".join(TOKENIZER.token_bytes(token) for token in ids if token < 270), last.finish_reason

    judge = library.compiled(library.library_tokenizer(library.Words.of(TOKENIZER, 300)), library.notation(constraint))
    for seed in range(4):
        text = answered(constraint, seed)[0].decode("utf-8", "ignore")
        for cut in {1, len(text) // 2, len(text) - 1} - {len(text), 0, -1}:
            matcher, begun = judge.deep_copy(), list(text[:cut].encode())
            assert matcher.try_consume_tokens(begun) == len(begun)
            if matcher.is_stopped():  # nothing can follow
                continue
            more, reason = answered(replace(constraint, begun=text[:cut]), seed)
            assert matcher.try_consume_tokens(list(more)) == len(more)
            assert reason == "length" or matcher.is_accepting()


@pytest.mark.parametrize(
    ("begun", "problem"),
    [
        ('{"name": "abcde', """'e' cannot come behind '{"name": "abcd'"""),
        ("x", "'x' cannot come first"),
        ('{"name":"ab","age":12,"ok":true}', "it has the form already, and nothing can follow it"),
        ("x" * 70_000, "the beginning of the answer has 70,000 characters"),
    ],
)
def test_a_beginning_that_does_not_have_the_form_is_refused_with_the_place(warm, begun, problem):
    form = Constraint.of_json_schema(PERSON)
    warm.compile(form).result()
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        warm.submit([1, 2, 3], SamplingParams(constraint=replace(form, begun=begun)), eos_ids=TOKENIZER.eos_ids)
    assert (caught.value.status, caught.value.param) == (400, "constraint")
    assert not warm.has_work


class LaterGrammar(Future[Any]):
    """A compiled form that is not ready when it is asked for the first time."""

    def __init__(self, grammar: Future[Any]) -> None:
        super().__init__()
        self._asked = False
        grammar.add_done_callback(lambda ready: self.set_result(ready.result()))

    def done(self) -> bool:
        before, self._asked = self._asked, True
        return before and super().done()


def test_a_beginning_is_refused_also_where_its_form_is_compiled_while_it_waits(monkeypatch):
    engine = engine_of()
    form, compile_form = replace(Constraint.of_choice(["yes", "no"]), begun="ya"), engine.compile
    with monkeypatch.context() as patched:
        patched.setattr(engine, "compile", lambda constraint: LaterGrammar(compile_form(constraint)))
        _, last = answers(engine, {"r": ([1, 2, 3], SamplingParams(constraint=form))})["r"]
    assert (last.finish_reason, last.refused) == ("error", "constraint")
    assert "'a' cannot come behind 'y'" in last.error
    assert "--reasoning-parser" not in last.error
    thinks = replace(form, begun="<think>So")
    with pytest.raises(RequestError, match="With --reasoning-parser think"):
        engine.submit([1, 2, 3], SamplingParams(constraint=thinks))
    ids, last = answers(engine, {"r": ([1, 2, 3], SamplingParams(constraint=replace(form, begun="y")))})["r"]
    assert (text_of(ids), last.finish_reason) == ("es", "stop")
    engine.close()


@pytest.mark.parametrize("constraint", KINDS, ids=range(len(KINDS)))
def test_what_stands_before_the_mark_that_a_form_begins_behind_is_free(constraint):
    tokenizer = library.library_tokenizer(library.Words.of(TOKENIZER, 300))
    alone, behind = (
        library.compiled(tokenizer, library.notation(each))
        for each in (constraint, replace(constraint, behind="</think>"))
    )
    for text in ("{}", '{"name":"a","age":1,"ok":true}', "ab", "abc", "ab 1", "(ab)", "", "7"):
        verdicts = []
        for matcher, whole in ((alone, text), (behind, f"Hm, {{ <b></think>\n\n{text}")):
            trial, ids = matcher.deep_copy(), list(whole.encode())
            verdicts.append(trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting())
        assert verdicts[0] == verdicts[1], text


UNCOMPILABLE = [
    (Constraint.of_regex("(a"), "unclosed group"),
    (Constraint.of_regex("a(?=b)"), "look-around"),
    (Constraint.of_regex("((a{1,100}){1,100}){1,100}"), "too many expressions"),
    (Constraint.of_regex("a?" * 1000 + "a" * 1000), "too many expressions"),
    (Constraint.of_lark("start: x"), "unknown name"),
    (Constraint.of_lark('{"grammars": []}'), "begins with a brace"),
    (Constraint.of_lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (Constraint.of_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (Constraint.of_json_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
    (
        Constraint.of_lark('start: %json {"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}'),
        "uniqueItems",
    ),
    (
        Constraint.of_json_schema({"allOf": [{"const": 9007199254740993}]}),
        "allOf.0.const: 9007199254740993 cannot be held exactly",
    ),
    (Constraint.of_json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "nothing satisfies it"),
    (Constraint.of_json_schema({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "oneOf"),
    (
        Constraint.of_json_schema(
            {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}, "type": "object"}
        ),
        "Current row has",
    ),
]


@pytest.mark.parametrize(("constraint", "reason"), UNCOMPILABLE, ids=range(len(UNCOMPILABLE)))
def test_class_d_what_cannot_be_compiled_is_refused_and_never_answered_freely(warm, constraint, reason):
    with pytest.raises(RequestError) as caught:
        warm.compile(constraint).result()
    assert (caught.value.status, caught.value.param) == (400, "constraint")
    assert f"the {constraint.name} cannot be compiled" in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(RequestError, match="cannot be compiled"):
        warm.submit([1], SamplingParams(constraint=constraint))
    assert not warm.has_work


BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*{'ab'[i % 2]}(a|b){{{i + 5}}}"} for i in range(40)]}


def test_class_d_a_schema_that_takes_minutes_is_refused_after_its_budget_while_others_are_answered(warm):
    warm.submit([1], SamplingParams(guided_json=BOMB), request_id="bomb")
    warm.submit([1], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), request_id="free")
    events = []
    while warm.has_work:
        events += warm.step()
    order = [event.request_id for event in events if event.finish_reason is not None]
    assert order == ["free", "bomb"]
    assert (events[-1].refused, events[-1].finish_reason) == ("constraint", "error")
    assert "it takes more than 2 s of a core" in events[-1].error
    assert answers(warm, {"next": ([1], SamplingParams(guided_regex="ab"))})["next"][0]


def test_a_request_is_taken_up_or_aborted_while_its_constraint_is_compiled(warm, monkeypatch):
    gate = threading.Event()
    slow = library.notation
    monkeypatch.setattr(grammars, "notation", lambda constraint: gate.wait(20) and slow(constraint))
    for name in ("kept", "left"):
        warm.submit([2], SamplingParams(max_tokens=9, guided_regex="qq|rr"), request_id=name)
    assert warm.step() == []
    warm.abort("left")
    assert [(event.request_id, event.finish_reason) for event in warm.step()] == [("left", "abort")]
    gate.set()
    events = []
    while warm.has_work:
        events += warm.step()
    assert {event.request_id for event in events} == {"kept"}
    assert events[0] == Event("kept", 0, []), "said to be compiled"
    assert events[-1].finish_reason == "stop"


def test_the_cache_of_compiled_constraints_is_bounded_and_used(warm, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 3)
    first = warm.compile(Constraint.of_choice(["again"]))
    first.result()
    assert warm.compile(Constraint.of_choice(["again"])) is first
    for i in range(6):
        warm.compile(Constraint.of_choice([f"other {i}"])).result()
        if i < 3:
            assert warm.compile(Constraint.of_choice(["again"])) is first, "what was used last stays"
    warm.compile(Constraint.of_choice(["last"])).result()
    assert len(warm._grammars) <= 4
    assert warm.compile(Constraint.of_choice(["again"])) is not first
    monkeypatch.setattr(grammars, "MAX_BYTES", 50)
    warm.compile(Constraint.of_choice(["x" * 40])).result()
    warm.compile(Constraint.of_choice(["y" * 40])).result()
    warm.compile(Constraint.of_choice(["z"])).result()
    assert len(warm._grammars) == 2, "the largest of both had to go"


def faulty(monkeypatch, fault):
    """Masks of answers with so many ids whose form is that of the choice "bad" go through `fault`."""
    inner = Matcher.fill

    def fill(self, mask):
        if self._min_tokens == 7:  # what tells the one from the others
            fault(self, mask)
        inner(self, mask)

    monkeypatch.setattr(Matcher, "fill", fill)


def burn(_matcher, _mask):
    end = time.thread_time() + 0.4
    while time.thread_time() < end:
        pass


# Each kind of executable and each fault once.
QUICK_FAULTS = {(FakeExecutable, "error"), (QueueingFake, "wrong id"), (ResamplingFake, "slow")}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=pytest.mark.slow if (kind, fault) not in QUICK_FAULTS else ())
        for kind in (FakeExecutable, QueueingFake, ResamplingFake)
        for fault in ("error", "slow", "wrong id")
    ],
)
def test_a_form_that_fails_ends_its_answer_alone(warm, monkeypatch, fault, kind):
    expected = answers(warm, mixed())
    if fault == "error":
        faulty(monkeypatch, lambda matcher, mask: matcher.fail("planted"))
        cause = "could not be kept: planted"
    elif fault == "slow":
        monkeypatch.setattr(masks, "MASK_SECONDS", 0.1)
        faulty(monkeypatch, burn)
        cause = "took more than 0.1 s"
    else:
        take = Matcher.take
        monkeypatch.setattr(Matcher, "take", lambda self, token: take(self, 0 if self._min_tokens == 7 else token))
        cause = "does not fit its form"
    engine = engine_of(kind=kind)
    bad = {"bad": ([77], SamplingParams(seed=1, min_tokens=7, max_tokens=50, guided_regex="[p-z]{20}"))}
    results = answers(engine, bad | mixed())
    engine.close()
    ids, last = results.pop("bad")
    assert (last.finish_reason, ids) == ("error", [])
    assert cause in last.error
    assert last.refused is None
    assert {name: ids for name, (ids, _) in results.items()} == {name: ids for name, (ids, _) in expected.items()}


def test_masks_are_given_up_only_where_one_takes_longer_than_its_time():
    now, told, filled = 100.0, [], []

    class Form:
        """Takes so many seconds, and looks on the way whether it is to be given up."""

        def __init__(self, *seconds):
            self.seconds = seconds

        def fill(self, mask):
            nonlocal now
            for seconds in self.seconds:
                now += seconds
                told.append(work.abandon())
            filled.append(self)

    forms = [Form(0.5, masks.MASK_SECONDS - 0.5), Form(masks.MASK_SECONDS, 0.25), Form(0.0)]
    work = masks._Work([(form, row) for row, form in enumerate(forms)], np.zeros((3, 1), np.uint32))
    work._now = lambda: now
    assert work.abandon() is None  # it has not begun
    work.run()
    assert told == [None, None, None, 1]
    assert filled == forms[:2]


@pytest.mark.parametrize(
    ("began", "seconds", "taken"), [(0.0, 0.02, True), (0.0, 0.021, False), (7.0, 0.019, True), (7.0, 0.021, False)]
)
def test_a_constraint_is_refused_where_its_masks_take_too_long_on_average(monkeypatch, began, seconds, taken):
    class Form:
        """One id, and its answers end."""

        def deep_copy(self):
            return self

        def consume_token(self, token):
            """It fits."""

        def is_error(self):
            return False

        def is_stopped(self):
            return True

    times = iter([began, began + library.WALKS * seconds])
    monkeypatch.setattr(library.time, "thread_time", lambda: next(times))
    monkeypatch.setattr(library, "fill", lambda _, mask: mask.fill(1))
    if taken:
        library.try_out(Form(), 300, ())
        return
    with pytest.raises(ValueError, match="takes 21 ms; simplify it"):
        library.try_out(Form(), 300, ())


@pytest.mark.parametrize(
    ("regex", "bare"),
    [
        *(("a", "a"), ("^a", "a"), ("a$", "a"), ("^a$", "a"), ("^", ""), ("$", ""), ("^$", ""), ("", "")),
        *((r"ab\$", r"ab\$"), (r"ab\\$", r"ab\\"), (r"ab\\\$", r"ab\\\$"), (r"\$", r"\$"), (r"\\$", r"\\")),
        *(("a^", "a^"), ("$a", "$a"), ("^^a", "^a"), ("a$$", "a$"), (r"a\b$", r"a\b"), (r"a\\b", r"a\\b")),
    ],
)
def test_anchors_that_say_what_holds_anyway_are_left_out(regex, bare):
    """A dollar behind an odd number of backslashes is a character."""
    assert library._anchored(regex) == bare


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "the library does not say why"),
        ("\n <x\n<grammar>\n", "<x"),
        ("x" * 300, "x" * 300),
        ("x" * 301, "x" * 300 + "..."),
        ("  first \nsecond", "first"),
        ("it fails:\nerror: the cause\nerror: another", "it fails: the cause"),
        ("it fails\nerror: the cause", "it fails"),
        ("it fails:", "it fails:"),
        ("NoExtension: x", "nothing satisfies it"),
    ],
)
def test_what_the_library_says_is_one_short_line(said, told):
    assert library._shortened(said) == told


def test_the_library_compiles_within_limits(monkeypatch):
    told = []

    class Fake:
        problem, warnings = "", []

        def __init__(self, *words, **options):
            told.append((words, options))

        def is_error(self):
            return bool(self.problem)

        def get_error(self):
            return self.problem

        def get_grammar_warnings(self):
            return self.warnings

    import llguidance

    monkeypatch.setattr(llguidance, "LLMatcher", Fake)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **limits: limits)
    assert isinstance(library.compiled("tokenizer", "grammar"), Fake)
    limits = {"step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 25_000, "verbose_errors": False}
    assert told == [(("tokenizer", "grammar"), {"log_level": 0, "limits": limits})]
    Fake.problem = "x" * 400
    with pytest.raises(ValueError, match=r"^x{300}\.\.\.$"):
        library.compiled("tokenizer", "grammar")
    Fake.problem, Fake.warnings = "", ["first", "second"]
    with pytest.raises(ValueError, match=r"^first$"):
        library.compiled("tokenizer", "grammar")


def test_a_trial_walks_through_two_answers_of_32_tokens(monkeypatch):
    consumed = []

    class Form:
        def deep_copy(self):
            consumed.append([])
            return self

        def consume_token(self, token):
            consumed[-1].append(token)

        def is_error(self):
            return False

        def is_stopped(self):
            return len(consumed) == 2 and len(consumed[-1]) == 5

    sizes = []

    def fill(_, mask):
        sizes.append(mask.size)
        mask[:] = 0
        mask[1] = 0b111  # ids 32 to 34, of which 33 ends an answer

    monkeypatch.setattr(library, "fill", fill)
    library.try_out(Form(), 64, (33,))
    assert [len(walk) for walk in consumed] == [32, 5]
    assert {token for walk in consumed for token in walk} == {32, 34}
    assert set(sizes) == {2}, "words of 32 bits"
    with pytest.raises(IndexError):
        library.try_out(Form(), 32, ())


def test_words_are_those_of_the_model_s_ids_alone():
    tokenizer = SimpleNamespace(eos_ids=(5, 9), special_ids={9, 5, 2}, token_bytes=lambda token: b"%d" % token)
    words = library.Words.of(tokenizer, 9)
    assert words == library.Words([b"%d" % token for token in range(9)], [2, 5], [5])
    assert library.Words.of(tokenizer, 10).ends == [5, 9]
    assert library.Words.of(tokenizer, 10).special == [2, 5, 9]
    with pytest.raises(ConfigError, match="no id that ends an answer"):
        library.Words.of(tokenizer, 5)


def test_a_text_is_spelled_as_the_model_does_where_the_bytes_are_the_same():
    words = library.Words([b"a", b"b", b" a"], [], [1, 0])
    for encode, text, ids in (
        (lambda _: [0, 1], "ab", [0, 1]),
        (lambda _: [2, 1], "ab", [7]),  # a space in front
        (None, "ab", [7]),
        (None, "", []),
    ):
        wrapper = library._Wrapper(words, encode)
        wrapper.greedy = lambda _: [7]
        assert wrapper(text) == ids
    assert (wrapper.eos_token_id, wrapper.tokens, wrapper.special_token_ids) == (1, words.tokens, [])
    assert (wrapper.is_tokenizer_wrapper, wrapper.bos_token_id) == (True, None)


@pytest.mark.parametrize(
    ("bits", "problem", "message"),
    [(1, "", None), (0, "", "no id may come next"), (0, "x" * 301, "x" * 300), (1, "bad\n", "bad")],
)
def test_a_mask_that_cannot_be_known_is_no_mask(bits, problem, message):
    mask = np.zeros(3, np.uint32)

    def compute(address, size):
        assert (address, size) == (mask.ctypes.data, 12)
        mask[2] = bits

    matcher = SimpleNamespace(
        unsafe_compute_mask_ptr=compute, is_error=lambda: bool(problem), get_error=lambda: problem
    )
    if message is None:
        library.fill(matcher, mask)
        assert mask.tolist() == [0, 0, 1]
        return
    with pytest.raises(ValueError, match=message):
        library.fill(matcher, mask)


def test_characters_that_mean_something_stand_as_their_numbers():
    assert library._literal("a.é\n{") == r"a\x{2e}é\x{a}\x{7b}"
    with pytest.raises(RequestError, match="the regex cannot be compiled: too large"):
        library.cannot_compile(Constraint.of_regex("a"), ValueError("too large"))


def test_as_many_forms_wait_as_the_documents_say():
    assert (grammars.MAX_PENDING, grammars.MAX_GRAMMARS, grammars.MAX_BYTES, grammars.THREADS) == (32, 32, 1_048_576, 2)


def test_spaces_in_json_are_bounded():
    spaces = re.compile(JSON_SPACE)
    assert [bool(spaces.fullmatch(" " * count)) for count in (0, 1, 64, 65)] == [False, True, True, False]


def test_what_is_wrong_with_a_constraint_is_what_the_trial_says(monkeypatch):
    vetting = Vetting(library.Words([], [], []))
    monkeypatch.setattr(vetting, "_ask", {"good": "", "bad": "it has no end"}.get)
    vetting.check("good")
    with pytest.raises(ValueError, match="it has no end"):
        vetting.check("bad")


def test_a_large_vocabulary_costs_a_trial_no_more_than_its_masks():
    """A JSON string allows nearly all of 200,000 ids, at each of the trial's steps."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"a%06d" % number for number in range(200_000)] + [b"<|end|>"]
    words = library.Words(tokens, [len(tokens) - 1], [len(tokens) - 1])
    tokenizer = library.library_tokenizer(words)
    text = 'start: %json {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
    library.try_out(library.compiled(tokenizer, text), len(tokens), words.ends)


def test_the_ends_of_an_answer_are_none_of_the_ids_that_a_trial_goes_on_with(monkeypatch):
    taken = []
    walker = SimpleNamespace(consume_token=taken.append, is_error=lambda: False, is_stopped=lambda: False)
    monkeypatch.setattr(library, "fill", lambda matcher, mask: mask.fill(0b1111))
    library.try_out(SimpleNamespace(deep_copy=lambda: walker), 5, [0, 2, 3])
    assert taken == [1] * library.WALKS * library.WALK_TOKENS


def test_a_form_that_took_too_long_is_tried_again_after_a_while(monkeypatch):
    engine = engine_of()
    trials = []

    def slow(*arguments):
        trials.append(arguments)
        if len(trials) == 1:
            raise library.SlowFormError("it takes more than 2 s of a core")

    monkeypatch.setattr(grammars, "try_out", slow)
    form = Constraint.of_regex("ab|cd")
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be compiled: it takes more than 2 s of a core"):
            engine.compile(form).result()
    assert len(trials) == 1
    monkeypatch.setattr(grammars, "SLOW_SECONDS", -1.0)
    engine.compile(form).result()
    assert len(trials) == 2
    engine.close()


def test_a_step_that_fails_leaves_no_masks_behind():
    engine = engine_of()
    engine.executable.fail_at = {2}
    params = SamplingParams(seed=1, max_tokens=30, guided_regex="[a-z]{9}")
    assert answers(engine, {"first": ([1], params)})["first"][1].finish_reason == "error"
    assert answers(engine, {"second": ([1], params)})["second"][1].finish_reason == "stop"
    engine.close()


def test_an_engine_without_a_tokenizer_refuses_by_name():
    engine = LocalEngine(FakeExecutable())
    with pytest.raises(RequestError, match="without a tokenizer") as caught:
        engine.compile(Constraint.of_json()).result()
    assert caught.value.param == "constraint"
    engine.close()


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = engine_of()
    with pytest.raises(
        RequestError, match=r"running this without llguidance.*pip install llguidance brings it"
    ) as caught:
        engine.compile(Constraint.of_json()).result()
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    engine.close()


def test_what_nobody_waits_for_is_not_compiled_and_no_more_than_some_wait(warm, monkeypatch):
    gate = threading.Event()
    slow = library.notation
    compiled = []
    monkeypatch.setattr(
        grammars, "notation", lambda form: gate.wait(20) and (compiled.append(form.text), slow(form))[1]
    )
    monkeypatch.setattr(grammars, "MAX_PENDING", 4)
    for i in range(4):
        warm.submit([2], SamplingParams(max_tokens=3, guided_regex=f"q{i}+"), request_id=f"r{i}")
    beyond = warm.compile(Constraint.of_regex("beyond"))
    with pytest.raises(RequestError, match="4 others are waiting"):
        beyond.result(0)
    assert len(warm._grammars) <= 4 + grammars.MAX_GRAMMARS
    warm.step()
    for i in range(1, 4):
        warm.abort(f"r{i}")
    warm.step()
    gate.set()
    while warm.has_work:
        warm.step()
    assert "q0+" in compiled
    assert "q3+" not in compiled
    assert warm.compile(Constraint.of_regex("q3+")).result(20) is not None, "cancelled is not refused"
