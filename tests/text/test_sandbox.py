"""Templates from strangers: they end in time, stay small, and reach nothing."""

import resource
import time
from typing import Any

import pytest
from chat_templates import CURIOUS, LLAMA3, MISTRAL, PHI
from template_helpers import rendered, template
from text_samples import MESSAGES

from roofline.common.errors import ConfigError, RequestError


def growing(step: str, start: str = "'a'", end: str = "", times: int = 99) -> str:
    """A template that puts `step`, an expression of ns.x, into ns.x many times."""
    loop = f"{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{loop}{{{{ {end or 1} }}}}"


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "string times": "{{ 'a' * 10**9 }}",
    "string times in a test": "{% if 'a' * 10**9 == 'b' %}{% endif %}",
    "doubling": growing("ns.x + ns.x"),
    "doubling by tilde": growing("ns.x ~ ns.x"),
    "doubling by join": growing("[ns.x, ns.x]|join"),
    "doubling by percent": growing("'%s%s' % (ns.x, ns.x)"),
    "doubling by format": growing("'{}{}'.format(ns.x, ns.x)"),
    "growing by replace": growing("ns.x.replace('a', ns.x)", "'aa'"),
    "growing by an empty replace": growing("ns.x.replace('', ns.x)", "'aa'"),
    "growing by join": growing("ns.x.join(ns.x)", "'aa'"),
    "growing by escape": growing("(ns.x|e) ~ ''", "'&&'", times=9999),
    "growing by repr": growing("[ns.x]|string", "'\\\\'"),
    "growing by tojson": growing("ns.x|tojson", "'\\\\'"),
    "list times": "{{ ([0] * 10**9)|length }}",
    "lists of lists": growing("[ns.x, ns.x]", end="ns.x"),
    "tuples, hashed": growing("(ns.x, ns.x)", "()", end="{ns.x: 1}"),
    "lists, compared": growing("[ns.x, ns.x]", end="ns.x == [ns.x[0], ns.x[1]]"),
    "dicts": growing("dict(a=ns.x, b=ns.x)", end="ns.x|tojson"),
    "namespaces": growing("namespace(a=ns.x, b=ns.x)", end="[ns]"),
    "batches": growing("ns.x|batch(1)|list", "[1]", times=999),
    "batch fill": "{{ [1]|batch(10**9, 'x')|list }}",
    "slices": "{{ [1]|slice(10**9)|list|length }}",
    "list doubling": growing("ns.x + ns.x", "[1]"),
    "depth": growing("(ns.x,)", "()", end="{ns.x: 1}", times=99999),
    "depth of iterators": growing("ns.x|map('string')", "[1]", end="ns.x|list + 1", times=99999),
    "skipping chain": growing("ns.x|select('odd')|list + range(99999)|list", "[1]", times=999),
    "empty loops": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 99999 }}",
    "squares": growing("ns.x * ns.x", "9"),
    "range": "{{ range(10**9)|list }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format width behind zeros": "{{ '{:000000001000000000}'.format(1) }}",
    "format width of many digits": "{{ ('{:' ~ '9' * 5000 ~ '}').format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%1000000000s'|format('a') }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a'|indent(10**9, true) }}",
    "indent by text": "{{ ('a\\n' * 90000)|indent('x' * 900) }}",
    "round": "{{ 1.5|round(10**8, 'ceil') }}",
    "tojson indent": "{{ [[1]]|tojson(indent=10**9) }}",
    "tojson indents": growing("[ns.x]", "range(90000)|list", end="ns.x|tojson(indent=900)", times=90),
    "split": "{{ ('a ' * 2000000).split()|length }}",
    "split sign": "{{ ('a ' * 2000000).split('a')|length }}",
    "splitlines": "{{ ('\\n' * 4000000).splitlines()|length }}",
    "characters": "{{ ('a' * 4000000)|list|length }}",
    "sorting": "{{ ('ab' * 2000000)|sort|length }}",
    "unique": "{{ ('ab' * 2000000)|unique|list }}",
    "mapping": "{{ ('ab' * 2000000)|map('upper')|list }}",
    "maximum": "{{ ('ab' * 2000000)|max }}",
    "loop over a string": "{% for c in 'a' * 4000000 %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "recursive loop over a string": "{% for i in [1] recursive %}{% if loop.depth < 4 %}{{ loop('a' * 4000000) }}"
    "{% endif %}{% endfor %}",
    "set block": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "keeping": growing("ns.x + ['a' * 1000000 ~ i]", "[]", times=9999),
    "work": "{% for i in range(9999) %}{% set x = 'a' * 4000000 %}{% endfor %}",
    "strftime": "{{ strftime_now('%9999d' * 9999) }}",
    "cycler": "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() }}"
    "{% endfor %}{% endfor %}",
    "quadratic in": "{% set l = range(90000)|list %}{% for i in range(90000) %}{% if 'a' in l %}{% endif %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_an_error(name: str) -> None:

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        template(BOMBS[name], seconds=0.05).render(MESSAGES[0])
    assert time.monotonic() - start < 3
    assert caught.value.status == 400
    assert caught.value.code in {"chat_template_budget", "chat_template_error"}
    assert len(str(caught.value)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024  # KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a[0]}'.format(a=messages) }}",
        "{{ self._TemplateReference__context }}",
        "{{ cycler.__init__ }}",
        "{{ (namespace(_x=1)) }}",
        "{{ raise_exception }}",
        "{{ [range] }}",
        "{{ messages.__len__() }}",
    ],
)
def test_nothing_of_python_is_in_reach(source: str) -> None:
    try:
        text = rendered(source)
    except RequestError as error:
        text = str(error)
    assert "0x" not in text
    assert "<class" not in text
    assert "<function" not in text
    assert "Environment" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% if x %}",
        "{{ 'a' | nosuchfilter }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% block a %}{% endblock %}",
        "{% for a in b %}{% include 'x' %}{% endfor %}",
        "{% for a in b %}{% else %}{% for c in d %}{% import 'x' as y %}{% endfor %}{% endfor %}",
        "{% if a %}{% macro m() %}{% from 'x' import y %}{% endmacro %}{% endif %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 50_000 + "1 }}",
        "{% for a in b %}" * 200 + "{% endfor %}" * 200,
    ],
)
def test_bad_sources_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        template(source)


def test_the_longest_template_has_128_times_1024_characters() -> None:
    assert rendered("a" * 131_072) == "a" * 131_072
    with pytest.raises(ConfigError, match="has 131,073 characters; 131,072 are allowed"):
        template("a" * 131_073)


def test_a_refusal_of_the_template_is_the_users_error() -> None:
    with pytest.raises(RequestError, match="must alternate") as caught:
        rendered(MISTRAL, [{"role": "assistant", "content": "x"}])
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


@pytest.mark.parametrize("call", ["loop()", "loop([], 1)", "loop([], x=1)", "loop([], 1, 2)"])
def test_a_recursive_loop_goes_on_with_one_list_alone(call: str) -> None:
    with pytest.raises(RequestError, match=r"TypeError|IndexError"):
        rendered("{% for i in [1] recursive %}{{ " + call + " }}{% endfor %}")
    assert rendered("{% for i in [[2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}") == "2"


@pytest.mark.parametrize("messages", [[{}], [{"role": "user"}], [{"role": "user", "content": 3}], [], ["x"], [None]])
@pytest.mark.parametrize("source", [None, LLAMA3, MISTRAL, CURIOUS])
def test_odd_messages_are_refused_or_rendered(source: str | None, messages: Any) -> None:
    status = 400
    try:
        assert all(part.text for part in template(source).render(messages))
    except RequestError as error:
        status = error.status
    assert status == 400


@pytest.mark.parametrize("bad", [{1, 2}, b"x", object()])
def test_values_that_are_no_json_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="JSON") as caught:
        template(None).render([{"role": "user", "content": bad}])
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "messages")
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested") as caught:
        template(None).render([{"role": "user", "content": deep}])
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "messages")
    with pytest.raises(RequestError, match="a message is a str") as caught:
        template(None).render(["x"])  # type: ignore[list-item]
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "messages")


@pytest.mark.parametrize("name", ["messages", "bos_token", "range", "raise_exception"])
def test_variables_of_a_request_cannot_replace_ours(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(None)._rendering.render(MESSAGES[0], None, True, {name: "x"})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", name)


def test_long_chats_are_refused_with_the_limit() -> None:
    with pytest.raises(RequestError, match="4,194,304") as caught:
        rendered(PHI, [{"role": "user", "content": "x" * 3_000_000}] * 2)
    assert (caught.value.status, caught.value.code) == (400, "chat_template_budget")
