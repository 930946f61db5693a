"""The limits within which the layers of two runs may differ, from both sides of each."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from roofline.train.parity.layers import Layers, compare, obstacle

TOKENS, SIZE = 64, 64 * 16  # 16 numbers a token


def line(
    activations: Sequence[float], gradients: Sequence[float] = (), precision: str = "fp32", **more: Any
) -> dict[str, Any]:
    """A line of probes: the first number of each sketch, and the length that belongs to it."""

    def part(name: str, value: float, length: str) -> dict[str, Any]:
        return {"name": name, "size": SIZE, length: more.get("length", 1.0), "sketch": [value, 1.0]}

    return {
        "step": 5,
        "rows": more.get("rows", 4),
        "tokens": more.get("tokens", TOKENS),
        "precision": precision,
        "activations": [part(f"a{i}", value, "rms") for i, value in enumerate(activations)],
        "gradients": [part(f"g{i}", value, "norm") for i, value in enumerate(gradients)],
    }


def named(a: Sequence[float], b: Sequence[float], **options: Any) -> str | None:
    return compare(line(a, **options), line(b, **options)).activation


@pytest.mark.parametrize(("precision", "unit"), [("fp32", 2.0**-24), ("amp_fp16", 2.0**-11), ("amp_bf16", 2.0**-8)])
def test_the_first_two_tensors_may_differ_by_four_roundings(precision: str, unit: float) -> None:
    limit = max(1e-5, 4 * unit)
    for place in range(2):
        for size, is_named in ((0.99, False), (1.01, True)):
            b = [0.0, 0.0, 0.0]
            b[place] = size * limit
            assert (named([0, 0, 0], b, precision=precision) == f"a{place}") == is_named
    assert named([0, 0, 0], [0, 0, max(1e-5, unit / 4) * 0.99], precision=precision) is None
    assert named([0, 0, 0], [0, 0, max(1e-5, unit / 4) * 1.01], precision=precision) == "a2"


def test_a_later_layer_may_double_the_greatest_difference_before_it() -> None:
    unit = 2.0**-8
    before = 3 * unit
    for size, name in ((2 * before + unit / 4 - 1e-6, None), (2 * before + unit / 4 + 1e-6, "a3")):
        assert named([0, 0, 0, 0], [before, 0, 0, size], precision="amp_bf16") == name
    found = compare(line([0, 0, 0], precision="amp_bf16"), line([before, unit, 0], precision="amp_bf16"))
    assert [layer.limit for layer in found.activations] == [4 * unit, 2 * before + 4 * unit, 2 * before + unit / 4]
    assert [layer.difference for layer in found.activations] == [before, unit, 0]


def test_gradients_are_judged_from_the_loss_backward() -> None:
    unit = 2.0**-8
    for size, name in ((31.9 * unit, None), (32.1 * unit, "g2")):
        a, b = (line([0], [0, 0, value], "amp_bf16") for value in (0, size))
        found = compare(a, b)
        assert found.gradient == name
        assert [layer.name for layer in found.gradients] == ["g2", "g1", "g0"]
        assert all(layer.change_limit is None for layer in found.gradients)
    for size, name in ((0.99e-4, None), (1.01e-4, "g1")):
        assert compare(line([0], [0, 0]), line([0], [0, size])).gradient == name


def test_the_coarser_of_two_precisions_counts() -> None:
    for one, other in (("fp32", "amp_bf16"), ("amp_bf16", "fp32")):
        found = compare(line([0.0], precision=one), line([0.0], precision=other))
        assert found.activations[0].limit == 4 * 2.0**-8


@pytest.mark.parametrize(("tokens", "independent"), [(64, 16), (4, 4), (SIZE, 1), (2 * SIZE, 1)])
def test_a_length_may_change_by_roundings_of_random_directions(tokens: int, independent: int) -> None:
    """As many as there are numbers of a token, or tokens if those are fewer."""
    difference = 1e-6
    limit = 1e-6 + 3 * difference / math.sqrt(independent)
    for by, is_beyond in ((0.99, False), (1.01, True)):
        for sign in (1, -1):
            a = line([0.0], tokens=tokens)
            b = line([difference], tokens=tokens, length=1 + sign * by * limit)
            layer = compare(a, b).activations[0]
            assert layer.change == pytest.approx(sign * by * limit, rel=1e-6)
            assert layer.change_limit == pytest.approx(limit)
            assert layer.beyond == is_beyond
    wide = compare(line([0.0], precision="amp_bf16", tokens=tokens), line([0.0], precision="amp_bf16", tokens=tokens))
    assert wide.activations[0].change_limit == 2.0**-8 / 8


def test_no_more_than_the_limit_counts_for_a_length() -> None:
    found = compare(line([0.0]), line([0.5], length=1.0))
    assert found.activations[0].change_limit == pytest.approx(1e-6 + 3 * 1e-5 / 4)


def test_repeats_give_limits_of_four_times_their_differences() -> None:
    def found(size: float, repeats: Sequence[float], **options: Any) -> Layers:
        return compare(line([0.0]), line([size]), [line([value]) for value in repeats], **options)

    for size, name in ((0.0799, None), (0.0801, "a0")):
        each = found(size, [0.01, 0.02])
        assert (each.activation, each.by_repeats, each.judged) == (name, True, True)
        assert each.activations[0].limit == pytest.approx(0.08)
        assert each.activations[0].change_limit is None
    assert found(0.9e-5, [1e-7]).activation is None
    assert found(1.1e-5, [1e-7]).activation == "a0"
    equal = found(0.9e-5, [0.0])
    assert (equal.by_repeats, equal.activation) == (False, None)
    assert found(0.5, [0.0], same_weights=False).activation is None
    assert not found(0.5, [0.0], same_weights=False).judged
    assert found(0.5, [0.01], same_weights=False).activation == "a0"
    finer = compare(line([0.0], precision="amp_bf16"), line([0.012]), [line([1e-7])])
    assert finer.activations[0].limit == 4 * 2.0**-8
    assert finer.activation is None


def test_what_is_not_finite_or_begins_at_nothing_is_beyond() -> None:
    assert named([0.0], [math.nan]) == "a0"
    nothing, something = line([0.0], length=0.0), line([0.0], length=1.0)
    assert compare(nothing, something).activations[0].change == math.inf
    assert compare(nothing, something).activation == "a0"
    assert compare(nothing, nothing).activation is None  # a tensor of zeros in both runs
    assert compare(nothing, nothing).activations[0].change == 0
    assert compare(line([0.0], length=0.0), line([0.1], length=0.0)).activations[0].difference == math.inf


def test_lines_of_other_rows_or_shapes_are_not_compared() -> None:
    one = line([0, 0], [0])
    assert obstacle(one, line([1, 1], [1])) is None
    for rows, tokens in ((5, TOKENS), (4, TOKENS + 1)):
        assert "other rows" in str(obstacle(one, line([0, 0], [0], rows=rows, tokens=tokens)))
    assert "activations differ" in str(obstacle(one, line([0], [0])))
    assert "gradients differ" in str(obstacle(one, line([0, 0], [0, 0])))
    other = line([0, 0], [0])
    other["gradients"][0]["size"] += 1
    assert "gradients differ" in str(obstacle(one, other))
