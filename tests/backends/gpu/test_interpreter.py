"""What the set-up of these tests mends in the interpreter: products of bf16, narrowing to nearest even; and races."""

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

    @triton.jit
    def turn(x, y, scratch, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(scratch + at, tl.load(x + at))
        if BARRIER:
            tl.debug_barrier()
        tl.store(y + at, tl.load(scratch + BLOCK - 1 - at))

    return cast, square, turn


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


def test_a_load_of_what_was_stored_needs_a_barrier(kernels, races):
    x, y, scratch = (torch.arange(16.0) for _ in range(3))
    races.barriers = 0
    kernels[2][(3,)](x, y, scratch, BLOCK=16, BARRIER=True)
    assert (y.tolist(), races.barriers) == (x.flip(0).tolist(), 3)
    with pytest.raises(Exception, match="a race"):
        kernels[2][(1,)](x, y, scratch, BLOCK=16, BARRIER=False)


def test_shapes_are_checked_and_are_those_of_the_language(interpreted):
    """Also the second time, when they are remembered."""
    import triton.language as tl

    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [4, 3])
        with pytest.raises(TypeError, match="0d block_type"):
            tl.block_type(tl.float32, [])
        block = tl.block_type(tl.float16, [tl.constexpr(4), 8])
        assert (list(block.shape), block.numel, block.element_ty) == ([4, 8], 32, tl.float16)
        assert str(block) == "<['4', '8'], fp16>"
        assert block == tl.block_type(tl.float16, [4, 8]) != tl.block_type(tl.float16, [8, 4])
        tensor = tl.tensor(None, block)
        assert ([size.value for size in tensor.shape], tensor.numel.value) == ([4, 8], 32)
        alone = tl.tensor(None, tl.float32)
        assert (len(alone.shape), alone.numel.value, alone.dtype) == (0, 1, tl.float32)
