"""The fused add and norm against the plain formula."""

import pytest

torch = pytest.importorskip("torch")
CASES = [(1, 576, True, False), (3, 576, False, False), (5, 100, True, True), (2, 2048, False, True)]


@pytest.mark.parametrize(("rows", "width", "with_delta", "layer"), CASES)
def test_add_norm(rows, width, with_delta, layer):
    from roofline.backends.gpu.kernels.add_norm import add_norm
    from roofline.hardware.chips import chips

    residual, delta = torch.randn(rows, width), torch.randn(rows, width).bfloat16()
    residual[0] *= 1e-3  # so small that eps counts
    delta[0] *= 1e-3
    weight, bias = torch.randn(width), torch.randn(width) if layer else None
    want = (residual + delta.float() if with_delta else residual).double()
    norm = want - want.mean(1, keepdim=True) if layer else want
    norm = norm * torch.rsqrt(norm.square().mean(1, keepdim=True) + 1e-5) * weight + (bias if layer else 0)
    summed, out = (torch.full_like(residual, float("nan")) for _ in range(2))
    add_norm(
        chips.get("sm_90"), residual, delta if with_delta else None, weight, bias, 1e-5,
        layer=layer, summed=summed if with_delta else None, out=out,
    )  # fmt: skip
    assert (out - norm).abs().max() < 2e-5
    assert not with_delta or (summed - want).abs().max() < 1e-6


@pytest.mark.parametrize("weights", [0, 1, 3])
def test_rows_that_lie_apart_of_parts_with_weights_of_their_own_or_none(weights):
    """Two views of one value, as a split gives them; three rows of weights take turns."""
    from roofline.backends.gpu.kernels.add_norm import add_norm
    from roofline.hardware.chips import chips

    both = torch.randn(6, 2 * 40 + 5)
    residual, delta = both[:, :40], both[:, 40:80]
    weight = torch.randn(weights, 40) if weights else None
    summed, out = (torch.full((6, 40), float("nan")) for _ in range(2))
    flat = None if weight is None else weight.flatten()
    add_norm(chips.get("sm_90"), residual, delta, flat, None, 1e-5, layer=False, summed=summed, out=out)
    want = (residual + delta).double()
    norm = want * torch.rsqrt(want.square().mean(1, keepdim=True) + 1e-5)
    norm = norm if weight is None else norm * weight.repeat(6 // weights, 1)
    assert (out - norm).abs().max() < 2e-5
    assert (summed - want).abs().max() < 1e-6


@pytest.mark.parametrize("chip", ["sm_90", "gfx942", "gfx1100"])
def test_no_more_threads_than_elements(chip):
    """In place, an element has one thread: a second one could read what the first has written."""
    from roofline.backends.gpu.kernels.add_norm import row_tile
    from roofline.hardware.chips import chips

    held = chips.get(chip)
    for block in (1 << power for power in range(15)):
        warps = row_tile(held, block).warps
        assert warps == 1 or warps * held.lanes <= block
        assert warps * held.lanes <= 1024
