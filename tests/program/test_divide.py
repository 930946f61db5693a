"""How ranks divide heads, columns and rows: nothing lost, nothing twice, no block cut; and what is refused."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roofline.common.errors import CapacityError
from roofline.program.passes.divide import divide_columns, divide_heads, divide_rows, divide_value_heads, evenly

ranks = st.integers(1, 9)
blocks = st.sampled_from([1, 32, 256])


def attempt(divide: Any, *given: Any) -> tuple[list[Any], int]:
    """The parts; none and how many there can be where there are too few."""
    try:
        return divide(*given), 0
    except CapacityError as error:
        return [], error.available


@given(st.integers(0, 500), ranks)
def test_even_parts_are_in_order_and_differ_by_one(count: int, parts: int) -> None:
    found = evenly(count, parts)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 60), blocks, ranks)
def test_columns_are_divided_between_blocks(units: int, block: int, count: int) -> None:
    width = units * max(block, 8)
    found, most = attempt(divide_columns, width, block, count, "w")
    if not found:
        assert most < count
        assert len(divide_columns(width, block, most, "w")) == most
        return
    assert [i for start, stop in found for i in range(start, stop)] == list(range(width))
    assert all(start < stop and start % max(block, 32) == 0 for start, stop in found)


def test_six_blocks_over_four_ranks() -> None:
    assert divide_columns(1536, 256, 4, "down") == [(0, 512), (512, 1024), (1024, 1280), (1280, 1536)]
    with pytest.raises(CapacityError, match=r"tensor_parallel=8 needs 8 units of 256 columns in down, 6 are available"):
        divide_columns(1536, 256, 8, "down")


def test_nine_heads_over_two_ranks_keep_their_groups() -> None:
    assert [h.heads for h in divide_heads(9, 9, 64, 1, 2)] == [(0, 5), (5, 9)]
    grouped = divide_heads(9, 3, 64, 32, 2)
    assert [(h.heads, h.kv_heads) for h in grouped] == [((0, 6), (0, 2)), ((6, 9), (2, 3))]


def test_kv_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    found = divide_heads(8, 2, 64, 256, 2)
    assert [(h.heads, h.kv_heads) for h in found] == [((0, 4), (0, 1)), ((4, 8), (1, 2))]
    found = divide_heads(9, 3, 64, 32, 4)
    assert [h.kv_heads for h in found] == [(0, 1), (0, 1), (1, 2), (2, 3)]
    assert [h.heads for h in found] == [(0, 2), (2, 3), (3, 6), (6, 9)]


def test_heads_that_blocks_hold_together_are_not_parted() -> None:
    with pytest.raises(CapacityError, match=r"4 query heads \(blocks of 256 columns stay whole\), 2 are available"):
        divide_heads(8, 4, 64, 256, 4)


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([16, 32, 64, 128]), blocks, ranks)
def test_heads_are_divided_once_and_read_their_own_kv_heads(
    kv_heads: int, group: int, head_dim: int, block: int, count: int
) -> None:
    heads = kv_heads * group
    assume(heads * head_dim % block == 0)  # else the matrix could not have the format
    found, most = attempt(divide_heads, heads, kv_heads, head_dim, block, count)
    if not found:
        assert most < count
        assert len(divide_heads(heads, kv_heads, head_dim, block, most)) == most
        return
    assert [i for h in found for i in range(*h.heads)] == list(range(heads))
    for part in found:
        (first, last), (kv_first, kv_last) = part.heads, part.kv_heads
        assert first < last
        assert first * head_dim % block == 0
        each, rest = divmod(last - first, kv_last - kv_first)
        assert not rest
        # attend reads kv head i // each: that must be the head's own.
        for i in range(last - first):
            assert kv_first + i // each == (first + i) // group


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from([16, 128]), blocks, ranks, st.booleans())
def test_value_heads_are_divided_once_and_read_their_own_key_heads(
    key_heads: int, group: int, value_dim: int, block: int, count: int, tiled: bool
) -> None:
    heads = key_heads * group
    assume(heads * value_dim % block == 0)
    found, most = attempt(divide_value_heads, heads, key_heads, value_dim, block, count, tiled)
    if not found:
        assert most < count
        assert len(divide_value_heads(heads, key_heads, value_dim, block, most, tiled)) == most
        return
    assert [i for h in found for i in range(*h.heads)] == list(range(heads))
    for part in found:
        (first, last), (key_first, key_last) = part.heads, part.kv_heads
        share, keys = last - first, key_last - key_first
        assert share % keys == first * value_dim % block == 0
        # The rule reads key head i % keys or i // (share / keys) of the rank's: that must be the head's own.
        for i in range(share):
            read = i % keys if tiled else i // (share // keys)
            assert key_first + read == ((first + i) % key_heads if tiled else (first + i) // group)


def test_value_heads_that_cannot_be_parted_are_named() -> None:
    with pytest.raises(CapacityError, match=r"2 parts of 4 value heads \(blocks of 256 columns stay whole\), 1 are"):
        divide_value_heads(4, 2, 64, 256, 2, False)


@given(st.integers(1, 3000), ranks)
def test_rows_are_divided_once(rows: int, count: int) -> None:
    if rows < count:
        with pytest.raises(CapacityError, match="rows in embed"):
            divide_rows(rows, count, "embed")
        return
    found = divide_rows(rows, count, "embed")
    assert [i for start, stop in found for i in range(start, stop)] == list(range(rows))
    assert all(start < stop for start, stop in found)


def test_rows_are_divided_by_64_where_each_rank_has_as_many() -> None:
    assert divide_rows(640, 4, "embed") == [(0, 192), (192, 384), (384, 512), (512, 640)]
    assert divide_rows(193, 3, "embed") == [(0, 128), (128, 192), (192, 193)]
    assert divide_rows(191, 3, "embed") == [(0, 64), (64, 128), (128, 191)]
    assert divide_rows(190, 3, "embed") == [(0, 64), (64, 127), (127, 190)]
