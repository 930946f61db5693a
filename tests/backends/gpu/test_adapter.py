"""LoRA per row against the plain formula in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")

UNITS = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of what rounding to nearest errs by


def adapters(count, rank, width, columns, dtype):
    """(a, b, scales) of `count` adapters."""
    a, b = torch.randn(count, rank, width) / width**0.5, torch.randn(count, columns, rank) / rank**0.5
    return a.to(dtype), b.to(dtype), torch.rand(count) + 0.5


def expected(x, a, b, scales, ids, out):
    want = out.double().clone()
    for row, i in enumerate(ids.tolist()):
        if i:
            want[row] += scales[i - 1].double() * (b[i - 1].double() @ (a[i - 1].double() @ x[row].double()))
    return want


def bound(x, a, b, scales, ids, out):
    """The largest error of each result.

    Of a product of n terms added up in float32 it is n units of what the terms come to without their signs: results
    that cancel have the errors of their terms. A rounding errs by a unit of what is rounded: the values between the
    products to x's dtype, the second product times its scale, the sum with what was there, and the result.
    The hundredth is for second orders.
    """
    unit = UNITS[torch.float32]
    largest = (unit + UNITS[out.dtype]) * expected(x, a, b, scales, ids, out).abs()
    for row, i in enumerate(ids.tolist()):
        if i:
            first, second, inputs = (each.double() for each in (a[i - 1], b[i - 1], x[row]))
            middle = (first @ inputs).abs()
            lost = len(inputs) * unit * (first.abs() @ inputs.abs()) + UNITS[x.dtype] * middle
            largest[row] += scales[i - 1] * (second.abs() @ (lost + (len(middle) + 1) * unit * middle))
    return 1.01 * largest


# rank, in, out, dtype of x, dtype of out
CASES = [
    (8, 200, 140, "bfloat16", "float32"),
    (16, 64, 33, "float32", "float32"),
    (40, 130, 96, "float16", "float32"),
    (64, 256, 130, "bfloat16", "bfloat16"),
    (1, 16, 1, "float32", "float32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ids", [[0, 2, 1, 0, 3, 3] * 6, [1] * 20, [3], [0] * 4, list(range(1, 4)) * 11], ids=len)
def test_adapter(case, ids):
    from roofline.backends.gpu.kernels.adapter import adapter

    rank, width, columns, name, out_name = case
    a, b, scales = adapters(3, rank, width, columns, getattr(torch, name))
    ids = torch.tensor(ids, dtype=torch.int32)
    x = torch.randn(len(ids), width + 8).to(a.dtype)[:, :width]
    wide = torch.randn(len(ids), columns + 9).to(getattr(torch, out_name))
    out, beyond = wide[:, :columns], wide[:, columns:].clone()
    before, want, largest = out.clone(), expected(x, a, b, scales, ids, out), bound(x, a, b, scales, ids, out)
    adapter(chips.get("sm_90"), x, a, b, scales, ids, out=out)
    assert ((out - want).abs() <= largest).all()
    assert torch.equal(out[ids == 0], before[ids == 0])
    assert torch.equal(wide[:, columns:], beyond)


def test_more_adapters_than_a_block_has_rows():
    from roofline.backends.gpu.kernels.adapter import adapter

    a, b, scales = adapters(40, 16, 64, 64, torch.float32)
    ids = torch.randperm(41).int()
    x, out = torch.randn(41, 64), torch.zeros(41, 64)
    adapter(chips.get("gfx942"), x, a, b, scales, ids, out=out)
    assert (out - expected(x, a, b, scales, ids, torch.zeros(41, 64))).abs().max() < 1e-4


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_a_row_is_the_same_alone_and_in_company(ids, data):
    from roofline.backends.gpu.kernels.adapter import adapter

    a, b, scales = adapters(3, 16, 48, 40, torch.bfloat16)
    ids = torch.tensor(ids, dtype=torch.int32)
    x, start = torch.randn(len(ids), 48).bfloat16(), torch.randn(len(ids), 40)
    row, broken = (data.draw(st.integers(0, len(ids) - 1)) for _ in range(2))
    if broken != row:
        x[broken] = float("nan")
    together, alone = start.clone(), start[row : row + 1].clone()
    adapter(chips.get("sm_90"), x, a, b, scales, ids, out=together)
    adapter(chips.get("sm_90"), x[row : row + 1], a, b, scales, ids[row : row + 1], out=alone)
    assert torch.equal(together[row : row + 1], alone)


def test_ids_that_no_adapter_has_give_nan_in_their_rows_alone():
    from roofline.backends.gpu.kernels.adapter import adapter

    a, b, scales = adapters(2, 8, 32, 32, torch.float32)
    out = torch.zeros(5, 32)
    adapter(chips.get("sm_90"), torch.randn(5, 32), a, b, scales, torch.tensor([1, 3, 0, -1, 2]).int(), out=out)
    assert out.isnan().all(1).tolist() == [False, True, False, True, False]
    assert not out[[0, 2, 4]].isnan().any()
