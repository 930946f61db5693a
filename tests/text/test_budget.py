"""Each limit of a rendering from both sides, and what filters make of their arguments as Jinja's own do."""

from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import pytest
from template_helpers import rendered, template
from text_samples import MESSAGES

from roofline.common.errors import RequestError
from roofline.text.templates import budget
from roofline.text.templates.budget import (
    RenderBudget,
    bounded,
    charge,
    check_items,
    check_width,
    metered,
    tick,
    ticking,
)
from roofline.text.templates.tracked_string import TrackedText, admit, literal, text, weight


@pytest.fixture
def meter() -> Iterator[RenderBudget]:
    """Of much; a test takes away what it needs."""
    meter = RenderBudget(60.0, 1_000_000, 1_000_000)
    with metered(meter):
        yield meter


def refused(what: str, run: Callable[..., object], *args: object) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        run(*args)
    assert (caught.value.status, caught.value.code) == (400, "chat_template_budget")


def test_a_text_is_charged_with_16_characters_more(meter: RenderBudget) -> None:
    meter.remaining, meter.longest, meter.characters = 100, 60, 1234
    charge(60)
    assert meter.remaining == 24
    charge(8)
    assert meter.remaining == 0
    refused("more than 1,234 characters of intermediate text", charge, 0)
    meter.remaining = 1000
    refused("makes a text of more than 60 characters", charge, 61)


def test_the_deadline_is_checked_before_each_item(meter: RenderBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(budget, "monotonic", lambda: now[0])
    with metered(RenderBudget(2.5, 0, 0)):
        now[0] = 102.5
        tick()
        assert list(ticking([1, 2])) == [1, 2]
        items = ticking([1, 2])
        assert next(items) == 1
        now[0] = 102.6
        refused(r"takes longer than 2\.5 s", next, items)
    tick()  # the meter around it is back


def test_lists_and_fields_have_a_largest_size(meter: RenderBudget) -> None:
    check_items(100_000)
    refused("a list of more than 100,000 items", check_items, 100_001)
    assert len(bounded(iter(range(100_000)))) == 100_000
    refused("a list of more than 100,000 items", bounded, iter(range(100_001)))
    for width in (1000, "1000", "0001000", "10.1000", ""):
        check_width(width)
    for width in (1001, "1001", "0000000001001", "10.1001", "1001.1", "*", "1.*", "{", "5{}"):
        refused("pads a field to more than 1000 characters", check_width, width)


def test_a_value_weighs_its_characters_and_items(meter: RenderBudget) -> None:
    shared = ["ab"]
    for value, size in (
        (None, 1),
        ("abc", 4),
        (["ab", {"k": 1}], 1 + 2 + 2 + 2 + 1),
        ((shared, shared), 1 + 2 + 2 * (1 + 2)),
        ([], 1),
    ):
        meter.longest = size
        assert weight(value) == size
        meter.longest = size - 1
        refused(rf"a value of more than {size - 1} characters and items", weight, value)
    meter.longest = 1_000_000
    nested: Any = 1
    for _ in range(99):
        nested = (nested,)
    assert weight(nested) == 100
    refused("nested more than 100 deep", weight, (nested,))
    with pytest.raises(RequestError, match="prints a object"):
        weight([object()], printed=True)
    assert weight([object()]) == 2


def test_what_an_operation_makes_is_checked(meter: RenderBudget) -> None:
    assert admit(2**4096 - 1) == 2**4096 - 1
    refused("a number of more than 4096 bits", admit, 2**4096)
    meter.remaining = 1000
    assert admit([1] * 246) == [1] * 246
    assert meter.remaining == 0
    meter.remaining = 1000
    refused("intermediate text", admit, [1] * 247)
    meter.remaining = 1_000_000
    refused("a list of more than 100,000 items", admit, [None] * 100_001)
    meter.remaining = 1000
    assert list(admit(iter([1] * 246))) == [1] * 246  # type: ignore[call-overload]
    assert meter.remaining == 0
    meter.remaining = 1000
    items = admit(iter("ab"))
    assert [type(item) for item in items] == [TrackedText, TrackedText]  # type: ignore[attr-defined]
    assert admit("x").mask == b"\0"  # type: ignore[attr-defined]


def test_case_and_repetition_are_charged_before_they_are_made(meter: RenderBudget) -> None:
    word = literal("ab")
    printed = [(lambda: literal("%r") % (["ab"],), 40), (lambda: text(["ab"]), 40)]  # of a weight of four
    tabs = [(lambda: literal("\t").expandtabs(9), 10), (literal("\t").expandtabs, 9)]
    for make, size in (*printed, *tabs, (word.upper, 6), (lambda: word * 5, 10)):
        meter.longest = size
        make()
        meter.longest = size - 1
        refused(f"a text of more than {size - 1} characters", make)
    meter.longest = 1000
    assert (word * 0, word * -3, 2 * word) == ("", "", "abab")
    assert (2 * word).mask == b"\1" * 4


SIZES = {
    "{{ ([0] * 100000)|length }}": "{{ ([0] * 100001)|length }}",
    "{{ (100000 * [0])|length }}": "{{ (100001 * [0])|length }}",
    "{{ (2 ** 2048) % 7 }}": "{{ (2 ** 2049) % 7 }}",
    "{{ 1 ** 4096 }}": "{{ 1 ** 4097 }}",
    "{{ 'a'.ljust(1000)|length }}": "{{ 'a'.ljust(1001)|length }}",
    "{{ ('%1000d' % 1)|length }}": "{{ ('%1001d' % 1)|length }}",
    "{{ '{:>1000}'.format(1)|length }}": "{{ '{:>1001}'.format(1)|length }}",
    "{{ 1.5|round(100) }}": "{{ 1.5|round(101) }}",
    "{{ 'a'|indent(1000) }}": "{{ 'a'|indent(1001) }}",
    "{{ 'a'|indent(' ' * 1000) }}": "{{ 'a'|indent(' ' * 1001) }}",
    "{{ [1]|tojson(indent=1000) }}": "{{ [1]|tojson(indent=1001) }}",
    "{{ [1]|tojson(separators=(',', ' ' * 1000)) }}": "{{ [1]|tojson(separators=(',', ' ' * 1001)) }}",
    "{{ [1]|batch(100000)|list }}": "{{ [1]|batch(100001)|list }}",
    "{{ [1]|slice(99999)|list|length }}": "{{ [1]|slice(100001)|list|length }}",
    "{{ ('a' * 99999).split('a')|length }}": "{{ ('a' * 100000).split('a')|length }}",
    "{{ ('a' * 99999).replace('', 'b')|length }}": "{{ ('a' * 100001).replace('', 'b')|length }}",
    "{{ ('\\n' * 100000).splitlines()|length }}": "{{ ('\\n' * 100001).splitlines()|length }}",
    "{{ ('a' * 4194304)|length }}": "{{ ('a' * 4194305)|length }}",
    "{{ strftime_now('a' * 1000)|length }}": "{{ strftime_now('a' * 1001)|length }}",
}


@pytest.mark.parametrize("fits", SIZES)
def test_the_largest_fits_and_one_more_does_not(fits: str) -> None:
    template(fits, seconds=20.0).render(MESSAGES[0])
    with pytest.raises(RequestError) as caught:
        template(SIZES[fits], seconds=20.0).render(MESSAGES[0])
    assert caught.value.code == "chat_template_budget"


def test_all_texts_together_may_have_64_million_characters() -> None:
    loop = "{% for i in range(TIMES) %}{% set x = 'a' * 4000000 %}{% endfor %}"
    template(loop.replace("TIMES", "8"), seconds=20.0).render(MESSAGES[0])  # charged before and when it is made
    with pytest.raises(RequestError, match="more than 67,108,864 characters of intermediate text"):
        template(loop.replace("TIMES", "9"), seconds=20.0).render(MESSAGES[0])


EXPRESSIONS = r"""
'a\nb\n\nc'|indent
'a\nb\n\nc'|indent(2, true, true)
'a\nb'|indent('--')
'x'|center
'x'|center(9)
[1, 2, 3]|batch(2, 0)|list
[1, 2, 3]|batch(2)|list
[1, 2, 3]|slice(2)|list
[1, 2, 3]|slice(2, 'x')|list
'aXbXc'|replace('X', '-')
'aXbXc'|replace('X', '-', 1)
'aXbXc'|replace('X', '-', none)
'<a href="b">&\'</a>'|e|string
1.55|round(1)
1.55|round(1, 'floor')
2.5|round
' x '|trim
'xxaxx'|trim('x')
'%s-%s'|format(1, 2)
'%(a)s %(b)r'|format(a=3, b='c')
[1, 'b']|join
[3, 1]|join(', ')
'aB cD'|title
'aB cD'|capitalize
'aB cD'.swapcase()
'%-5d|%+.2f|%%|%5s|%r|%x' % (3, 1.5, 'ab', 'c', 255)
'%s' % none
'{:>4}|{1}|{0!r}|{a:.2f}'.replace('{:', '{0:').format(7, 'x', a=1.0)
'{}-{}'.format(1, 'b')
'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1)
' a  b '.split()
'a,b'.split(',', 0) + ' a b'.split(none, 0) + 'a,b'.rsplit(',', 0)
'a b c'.rsplit(none, 1)
'a,b,c'.partition(',')
'a,b,c'.rpartition(',')
'abc'.partition('-')
'abc'.rpartition('-')
'a\r\nb\n\nc'.splitlines()
'a\r\nb\n\nc'.splitlines(true)
'abc'.removeprefix('a') ~ 'abc'.removesuffix('c') ~ 'abc'.removesuffix('')
'aaa'.replace('a', 'b', 2)
'abc'.replace('', '-')
'abc'.replace('', '-', 2)
'abc'.replace('', '-', 0)
'a\tb'.expandtabs() ~ 'a\tb'.expandtabs(3)
'7'.zfill(3) ~ 'a'.center(4, '*') ~ 'b'.rjust(3)
'abc'[0] ~ 'abc'[-1] ~ 'abc'[1:] ~ 'abc'[::-1]
'a' in 'abc' and 'd' not in 'abc'
'a' == 'a' and 'a' != 'b' and not ('a' != 'a')
7 // 2 ~ 7 % 4 ~ 2 ** 5 ~ 7 / 2 ~ (7 - 9)
[1] + [2] + [3] * 2
(2, 3) + (4,)
dict(a=1, b=[2])|tojson
dict([('a', 1)], b=2)|items|list
[3, 1, 2]|sort(reverse=true)
['b', 'A']|map('upper')|list
'abc'|list
'abc'|first ~ 'abc'|last ~ 'abc'|length
range(3)|sum
namespace(a=1).a
'a'|default('b') ~ nothing|default('c')
'str'.upper().lower().islower()
"""


@pytest.mark.parametrize("expression", EXPRESSIONS.strip().splitlines())
def test_expressions_have_the_values_of_jinja(expression: str) -> None:
    source = "{{ " + expression + " }}"
    assert rendered(source) == jinja2.Environment().from_string(source).render()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ [1]|join(attribute='a') }}", "join by attribute"),
        ("{{ namespace(_a=1) }}", "names must not begin with an underscore"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "names must not begin with an underscore"),
        ("{{ '%s' % (1, 2) }}", "not all arguments converted"),
        ("{{ '%(a)s' % (1,) }}", "format requires a mapping"),
        ("{{ 'a' + 1 }}", "a string and a int cannot be added"),
        ("{{ '{a.b}'.format(a=1) }}", "only names are allowed"),
        ("{{ '{a[0]}'.format(a=[1]) }}", "only names are allowed"),
        ("{{ '%9s' % cycler }}", "prints a type"),
        ("{{ '{:9}'.format([cycler]) }}", "prints a type"),
        ("{{ '{}'.format() }}", "StopIteration|IndexError|fails on these messages"),
    ],
)
def test_what_an_expression_may_not_do(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        rendered(source)
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


LOOPS = [
    "{% for i in [[1, [2, 3]], 4] recursive %}{{ loop.depth }}{{ loop(i) if i is iterable else i }}{% endfor %}",
    "{% for c in 'ab' %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{% endfor %}",
    "{% for c in 'abc' %}{{ loop.cycle('x', 'y') }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{% for i in range(5) if i % 2 %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% else %}none{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(3) %}c{% endcall %}",
    "{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('-') %}{{ j() }}{{ j() }}",
    "{% set d = {'a': 1, 'items': 2} %}{{ d.a }}{{ d['items'] }}{{ d.get('b', 3) }}{{ d.keys()|list }}{{ d.nothing }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x ~ [x][0] }}{% filter upper %}b{% endfilter %}",
    "{% for a, (b, c) in [[1, (2, 3)]] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% set d, e = 4, [5] %}{{ d }}{{ (e, d)[0] }}",
    "{% set x = 3 %}{{ x + 1 }}{{ x * 'a' }}{{ -x }}{{ +x }}{{ 'b' if x > 2 else 'c' }}{{ x == 3 and not x is odd }}",
    "{% set ns = namespace(a=1) %}{% for i in [2] %}{% set ns.a = i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns['a'] }}",
    "{{ [1, 2].index(2) }}{{ 'ab'[5] }}{{ 'ab'[1] }}{{ [3][0] }}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_statements_do_what_they_do_in_jinja(source: str) -> None:
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    assert rendered(source) == plain.from_string(source).render()


def test_a_refusal_has_a_thousand_characters_of_the_template() -> None:
    with pytest.raises(RequestError) as caught:
        rendered("{{ raise_exception('x' * 1005) }}")
    assert str(caught.value).endswith("x" * 1000)
    assert "x" * 1001 not in str(caught.value)


def test_containers_of_messages_are_64_deep_at_most() -> None:
    def messages(depth: int) -> list[dict[str, object]]:
        value: object = "x"
        for _ in range(depth):
            value = [value]
        return [{"role": "user", "content": value}]

    source = "{{ messages[0].content|tojson }}"
    assert "x" in rendered(source, messages(64))
    with pytest.raises(RequestError, match="messages is nested more than 64 deep"):
        rendered(source, messages(65))
