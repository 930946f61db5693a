"""What the set-up of these tests mends in Triton's interpreter: products of bf16, and narrowing to nearest even."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def kernels(interpreted):
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x, y, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))

    @triton.jit
    def square(x, y, SIDE: tl.constexpr):
        at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        tile = tl.load(x + at)
        tl.store(y + at, tl.dot(tile, tile))

    return cast, square


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_floats_are_rounded_to_nearest_even(kernels, dtype):
    x = torch.cat([torch.randn(1000) * torch.logspace(-4, 2, 1000), torch.tensor([0.0, 1.0625, 1.1875, 240.0] * 6)])
    x, want = x[:1024].clamp(-240, 240), getattr(torch, dtype)
    y = torch.zeros(1024, dtype=want)
    kernels[0][(1,)](x, y, BLOCK=1024)
    assert torch.equal(y.float(), x.to(want).float())


def test_products_of_bf16(kernels):
    x, y = torch.randn(16, 16).bfloat16(), torch.zeros(16, 16)
    kernels[1][(1,)](x, y, SIDE=16)
    assert (y - x.float() @ x.float()).abs().max() < 1e-5
