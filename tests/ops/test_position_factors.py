"""Factors by position: the op, the table that backends read, and what transformers multiplies queries by."""

import math
from itertools import pairwise

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.ops.position_factors import PositionFactors

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

from roofline import ops  # noqa: E402
from roofline.ops.rows import TurnedPositions  # noqa: E402

POSITIONS = [0, 6, 7, 13, 14, 21, 20_000, 262_143]


@pytest.mark.parametrize("offset", [0, 1])
def test_a_factor_is_one_within_the_first_context_and_steps_at_each_further_one(offset: int) -> None:
    want = [1 + 0.3 * math.log(1 + (at + offset) // 7) for at in POSITIONS]
    table = PositionFactors(0.3, 7, offset).at(np.array(POSITIONS, np.int32))
    assert table.dtype == np.float32
    assert table.tolist() == [float(np.float32(factor)) for factor in want]
    x = torch.randn(len(POSITIONS), 5)
    scaled = ops.scale_by_position(x, torch.tensor(POSITIONS), 0.3, 7, offset)
    assert torch.equal(scaled, x * torch.from_numpy(table)[:, None]), "the op and the table are one"
    assert table[0] == table[1 - offset] == 1.0
    assert all(before <= after for before, after in pairwise(table))


def test_the_op_is_what_transformers_multiplies_queries_by() -> None:
    theirs = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    positions = torch.tensor([POSITIONS])
    x = torch.randn(len(POSITIONS), 6, dtype=torch.float64)
    want = x * theirs.get_llama_4_attn_scale(positions, 0.1, 16384)[0, 0].double()
    assert torch.allclose(ops.scale_by_position(x.float(), positions[0], 0.1, 16384), want.float(), rtol=3e-7)


def test_the_gradient_is_multiplied_by_the_factor() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    at = torch.tensor([0, 8, 17, 25])
    ops.scale_by_position(x, TurnedPositions(at, torch.empty(0), torch.empty(0)), 0.5, 8).sum().backward()
    want = torch.from_numpy(PositionFactors(0.5, 8).at(at.numpy()))
    assert torch.equal(x.grad, want[:, None].expand(4, 3))


def test_16_bit_rows_are_multiplied_in_float32_and_rounded_once() -> None:
    x = torch.randn(2, 64).bfloat16()
    scaled = ops.scale_by_position(x, torch.tensor([8, 64]), 0.01, 8)
    factors = torch.from_numpy(PositionFactors(0.01, 8).at(np.array([8, 64])))
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled, (x.float() * factors[:, None]).bfloat16())
    assert not torch.equal(scaled, x * factors.bfloat16()[:, None])


@pytest.mark.parametrize("wrong", [(0.0, 4, 0), (-0.1, 4, 0), (math.inf, 4, 0), (0.1, 0, 0), (0.1, 4, -1)])
def test_factors_that_cannot_be(wrong: tuple[float, int, int]) -> None:
    with pytest.raises(ConfigError, match="factors by position cannot be"):
        PositionFactors(*wrong)
