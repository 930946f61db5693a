"""Kernels on plain tensors, in Triton's interpreter, against the same in torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def chip():
    from roofline.hardware.chips import chips

    return chips.get("sm_90")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, wanted):
    """Within a rounding of got's type of the largest value."""
    return (got.double() - wanted.double()).abs().max() <= RTOL[got.dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", RTOL)
def test_norms(dtype):
    from roofline.backends.gpu.runtime import dense

    x = random(40, 2, 3, dtype=dtype).permute(1, 2, 0)  # rows lie apart
    weight, bias = (random(40, dtype=dtype, seed=s) for s in (1, 2))
    wide = x.double()
    assert close(dense.norm(chip(), x, weight, None, 1e-6, False), torch.rms_norm(wide, (40,), weight.double(), 1e-6))
    wanted = torch.layer_norm(wide, (40,), weight.double(), bias.double(), 1e-6)
    assert close(dense.norm(chip(), x, weight, bias, 1e-6, True), wanted)
    residual = random(2, 3, 40, seed=5)
    kept = residual.clone()
    summed, normed = dense.add_norm(chip(), residual, x, weight, None, 1e-6, False)
    assert torch.equal(residual, kept)
    assert summed.dtype == torch.float32
    assert normed.dtype == dtype
    assert close(summed, residual.double() + wide)
    assert close(normed, torch.rms_norm(residual.double() + wide, (40,), weight.double(), 1e-6))


def test_weights_of_norms_and_biases_may_lie_apart():
    from roofline.backends.gpu.runtime import dense

    x, both = random(3, 40), random(40, 2, seed=1)
    weight, bias = both.unbind(1)
    assert not weight.is_contiguous()
    wanted = torch.layer_norm(x.double(), (40,), weight.double(), bias.double(), 1e-6)
    assert close(dense.norm(chip(), x, weight, bias, 1e-6, True), wanted)
    assert close(dense.add_norm(chip(), torch.zeros_like(x), x, weight, bias, 1e-6, True)[1], wanted)


def test_silu_mul():
    from roofline.backends.gpu.runtime import dense

    both = random(2, 3, 96).bfloat16()
    gate, up = both.split(48, dim=-1)
    wanted = torch.nn.functional.silu(gate.double()) * up.double()
    assert close(dense.silu_mul(chip(), gate, up), wanted)
    turned = random(3, 48, 2).transpose(1, 2)
    assert close(dense.silu_mul(chip(), turned, turned), torch.nn.functional.silu(turned.double()) * turned)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys", "options"),
    [
        (2, 4, 2, 1, 33, {}),
        (1, 4, 4, 17, 17, {}),
        (2, 6, 2, 5, 32, {"window": 7}),
        (1, 2, 1, 3, 600, {"soft_cap": 5.0}),  # keys of more than one split
        (1, 8, 1, 40, 48, {"window": 20, "soft_cap": 3.0}),
    ],
)
def test_attend(batch, heads, kv_heads, queries, keys, options):
    from roofline.backends.gpu.runtime import dense

    q = random(batch, heads, queries, 16)
    k, v = (random(batch, kv_heads, keys, 16, seed=s) for s in (1, 2))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if options.get("window"):
        mask = mask.triu(keys - queries - options["window"] + 1)
    wide = k.double().repeat_interleave(heads // kv_heads, 1), v.double().repeat_interleave(heads // kv_heads, 1)
    scores = q.double() @ wide[0].transpose(2, 3) * 0.3
    if cap := options.get("soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    wanted = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ wide[1]
    got = dense.attend(chip(), q, k, v, 0.3, **options)
    assert (got.double() - wanted).abs().max() < 5e-6
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]  # [batch, tokens, heads, dim] in memory
    assert torch.equal(dense.attend(chip(), *apart, 0.3, **options), got)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # The kernel itself has every format in test_linear_quant.py.
        pytest.param(
            name, dtype, marks=() if dtype == torch.bfloat16 and name in ("Q4_1", "Q6_K") else pytest.mark.slow
        )
        for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_linear_quant(name, dtype):
    from roofline.backends.gpu.pack import pack
    from roofline.backends.gpu.runtime import dense
    from roofline.ops import formats

    values = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    raw = formats.get(name).quantize(values)
    packed = pack(raw, name, 40, 256).to("cpu")
    matrix = torch.from_numpy(formats.get(name).dequantize(raw, (40, 256))).double()
    x, bias = random(2, 256, 3, dtype=dtype).transpose(1, 2), random(40, seed=3)
    got = dense.linear_quant(chip(), x, packed, bias)
    assert got.dtype == dtype
    assert close(got, x.double() @ matrix.T + bias.double())
    assert close(dense.linear_quant(chip(), x[0, 1], packed, None), x[0, 1].double() @ matrix.T)


def test_the_operators_of_torch_hand_their_arguments_on(monkeypatch):
    """What torch calls on a GPU, told to take the interpreter, against what it calls on the CPU."""
    from contextlib import nullcontext

    from roofline.torch import PackedLinear, ops

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ops.dense, "chip_of", lambda number: chip())
    x, y, weight, bias = (random(*shape, seed=s) for s, shape in enumerate([(3, 64), (3, 64), (64,), (64,)]))
    layer = PackedLinear.from_linear(torch.nn.Linear(64, 20), "Q4_1")
    parts = (layer.words, layer.high, layer.scale, layer.minimum, layer.super_scale, layer.super_minimum, layer.bias)
    q, k, v = random(1, 4, 2, 16), random(1, 2, 9, 16, seed=1), random(1, 2, 9, 16, seed=2)
    for on_gpu, on_cpu, operands in (
        (ops._norm, ops.norm, (x, weight, bias, 1e-2, True)),
        (ops._add_norm, ops.add_norm, (x, y, weight, bias, 1e-2, False)),
        (ops._silu_mul, ops.silu_mul, (x, y)),
        (ops._attend, ops.attend, (q, k, v, None, 3, 2.0)),
        (ops._linear_quant, ops.linear_quant, (x, *parts, "Q4_1")),
    ):
        got, wanted = on_gpu(*operands), on_cpu(*operands)
        for a, b in zip(got, wanted, strict=True) if isinstance(got, tuple) else ((got, wanted),):
            assert a.dtype == b.dtype
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), on_cpu
