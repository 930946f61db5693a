"""Columns moved head by head, beside slices that are written out."""

import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.symbol import Type

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

TWO = torch.arange(12.0).view(2, 6)  # two rows of two heads of three columns


def test_columns_of_each_head_with_zeros_behind_its_end() -> None:
    assert ops.cut_heads(TWO, 2, 1, 3).tolist() == [[1, 2, 4, 5], [7, 8, 10, 11]]
    assert ops.cut_heads(TWO, 2, 1, 5).tolist() == [[1, 2, 0, 0, 4, 5, 0, 0], [7, 8, 0, 0, 10, 11, 0, 0]]
    assert ops.cut_heads(TWO[:, 2:4], 1, 1, 2).tolist() == [[3], [9]]  # of a view too


def test_heads_behind_those_of_another_value_or_behind_a_head_of_all() -> None:
    other = -TWO[:, :2]
    assert ops.join_heads(TWO, other, 2).tolist() == [[0, 1, 2, 0, 3, 4, 5, -1], [6, 7, 8, -6, 9, 10, 11, -7]]
    assert ops.join_heads(other, TWO, 2, shared=True)[0].tolist() == [0, -1, 0, 1, 2, 0, -1, 3, 4, 5]
    assert ops.join_heads(TWO, other, 1).tolist() == torch.cat([TWO, other], 1).tolist()


def test_a_step_without_rows_has_none() -> None:
    """As where no logits are wanted, and what works on their rows has moved behind them."""
    none = TWO[:0]
    assert ops.cut_heads(none, 2, 1, 3).shape == (0, 4)
    assert ops.join_heads(none, none, 2).shape == (0, 12)


@pytest.mark.parametrize("edges", [(3, 4), (-1, 2), (2, 2)])
def test_columns_that_are_not_there(edges: tuple[int, int]) -> None:
    cut = registry.get("cut_heads")
    with pytest.raises(ConfigError, match=f"columns {edges[0]}:{edges[1]} of 2 heads in 6"):
        cut.results([Type("f32", "tokens", (6,))], [], {"heads": 2, "start": edges[0], "stop": edges[1]})


def test_values_that_are_no_heads() -> None:
    six, five = Type("f32", "tokens", (6,)), Type("f32", "tokens", (5,))
    join = registry.get("join_heads")
    for x, y in ((six, five), (five, six), (Type("bf16", "tokens", (6,)), six)):
        with pytest.raises(ConfigError, match="are not 2 heads each"):
            join.results([x, y], [], {"heads": 2})
    assert join.results([five, six], [], {"heads": 2, "shared": True}) == (Type("f32", "tokens", (16,)),)
