"""Our kernels as operators of torch: their contract with torch, what they compute, and torch.compile on top."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.library import opcheck  # noqa: E402

from roofline.backends.gpu.pack import LAYOUTS, ORDER  # noqa: E402
from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.ops import formats  # noqa: E402
from roofline.torch import PackedLinear, ops  # noqa: E402

RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, wanted):
    """Within a rounding of got's type of the largest value."""
    return (got.double() - wanted.double()).abs().max() <= RTOL[got.dtype] * wanted.abs().max()


def layer_of(name, rows=24, columns=256, bias=True):
    """(PackedLinear, its matrix in float64, bias)."""
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    raw = formats.get(name).quantize(values)
    held = torch.from_numpy(formats.get(name).dequantize(raw, (rows, columns))).double()
    added = random(rows) if bias else None
    return PackedLinear.from_bytes(raw, name, rows, columns, added), held, added


def arrays(layer):
    return [getattr(layer, n) for n in ("words", "high", "scale", "minimum", "super_scale", "super_minimum", "bias")]


SAMPLES = {
    "norm": (ops.norm, lambda: (random(2, 3, 40), random(40))),
    "layer_norm": (ops.norm, lambda: (random(5, 40).bfloat16(), random(40), random(40), 1e-6, True)),
    "norm_strided": (ops.norm, lambda: (random(40, 6).T, random(40))),
    "add_norm": (ops.add_norm, lambda: (random(3, 40), random(3, 40, seed=1).bfloat16(), random(40), None, 1e-6)),
    "silu_mul": (ops.silu_mul, lambda: (random(2, 3, 24).half(), random(2, 3, 24, seed=1).half())),
    "silu_mul_strided": (ops.silu_mul, lambda: tuple(random(3, 48)[:, s] for s in (slice(24), slice(24, 48)))),
    "attend": (ops.attend, lambda: (random(2, 4, 3, 16), random(2, 2, 19, 16), random(2, 2, 19, 16, seed=1))),
    "attend_options": (ops.attend, lambda: (*(random(1, 2, 9, 8, seed=s).bfloat16() for s in range(3)), 0.3, 4, 20.0)),
    **{
        f"linear_{name}": (ops.linear_quant, lambda n=name: (random(2, 3, 256), *arrays(layer_of(n)[0]), n))
        for name in LAYOUTS
    },
}


@pytest.mark.parametrize("name", SAMPLES)
def test_torch_finds_nothing_to_complain_about(name):
    """Schema, fake kernels (also of unknown sizes), no aliases, no mutation."""
    op, sample = SAMPLES[name]
    results = opcheck(op, sample())
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", RTOL)
def test_norms_and_gates(dtype):
    x, delta = (random(2, 5, 48, dtype=dtype, seed=s) for s in range(2))
    weight, bias = (random(48, dtype=dtype, seed=s) for s in (2, 3))
    wide = x.double()
    assert close(ops.norm(x, weight, None, 1e-6), torch.rms_norm(wide, (48,), weight.double(), 1e-6))
    wanted = torch.layer_norm(wide, (48,), weight.double(), bias.double(), 1e-6)
    assert close(ops.norm(x, weight, bias, 1e-6, True), wanted)
    summed, normed = ops.add_norm(x.float(), delta, weight, None, 1e-6)
    assert summed.dtype == torch.float32
    assert close(summed, wide + delta.double())
    assert normed.dtype == dtype
    assert close(normed, torch.rms_norm(wide + delta.double(), (48,), weight.double(), 1e-6))
    assert close(ops.silu_mul(x, delta), torch.nn.functional.silu(wide) * delta.double())


@pytest.mark.parametrize(("heads", "kv_heads", "queries", "keys"), [(4, 4, 7, 7), (6, 2, 1, 33), (8, 1, 5, 21)])
@pytest.mark.parametrize("dtype", RTOL)
def test_attend_equals_torchs_own(heads, kv_heads, queries, keys, dtype):
    q = random(2, heads, queries, 16, dtype=dtype)
    k, v = (random(2, kv_heads, keys, 16, dtype=dtype, seed=s) for s in (1, 2))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True
    )
    assert close(ops.attend(q, k, v), wanted)
    windowed = mask.triu(keys - queries - 3)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=windowed, enable_gqa=True, scale=0.7
    )
    assert close(ops.attend(q, k, v, 0.7, 4), wanted)


def test_attend_with_a_soft_cap_is_the_vocabularys():
    """Against `ops.attend`, the reference of the whole house."""
    from roofline.ops import registry

    q, k, v = random(1, 4, 9, 16), random(1, 2, 9, 16, seed=1), random(1, 2, 9, 16, seed=2)

    class Cache:
        segments = ((0, 9, 0),)

        def read(self, layer, index):
            return k[0].transpose(0, 1), v[0].transpose(0, 1)

    rows = q[0].transpose(0, 1).reshape(9, 64)
    wanted = registry.get("attend").reference(rows, Cache(), 0, 4, 0.4, window=5, soft_cap=3.0)
    got = ops.attend(q, k, v, 0.4, 5, 3.0)[0].transpose(0, 1).reshape(9, 64)
    assert close(got, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_linear_multiplies_with_the_files_values(name):
    layer, values, bias = layer_of(name)
    x = random(3, 5, 256)
    assert close(layer(x), x.double() @ values.T + bias.double())
    plain, _, _ = layer_of(name, bias=False)
    assert close(plain(x.bfloat16()), x.bfloat16().double() @ values.T)


def test_packed_linear_is_a_module_like_others():
    linear = torch.nn.Linear(64, 10)
    layer = PackedLinear.from_linear(linear, "Q8_0")
    x = random(4, 64)
    assert (layer(x) - linear(x)).abs().max() < 0.02
    other = PackedLinear.from_linear(torch.nn.Linear(64, 10), "Q8_0")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    older = layer.state_dict() | {"_extra_state": torch.tensor([1])}
    with pytest.raises(ConfigError, match="saved in layout 1 of its weights"):
        other.load_state_dict(older)
    with pytest.raises(RuntimeError, match="_extra_state"):
        other.load_state_dict({name: value for name, value in older.items() if name != "_extra_state"})
    assert "format=Q8_0" in repr(layer)
    with pytest.raises(ConfigError, match="multiples of 32"):
        PackedLinear.from_linear(torch.nn.Linear(40, 10))
    with pytest.raises(ConfigError, match=r"Q8_0 of 10 rows and 64 columns is uint8 \[680\], got uint8 \[640\]"):
        PackedLinear.from_bytes(np.zeros(640, np.uint8), "Q8_0", 10, 64)


@pytest.mark.parametrize("form", ["F32", "NF4", "q8_0", "bogus"])
def test_formats_without_a_kernel_are_refused_with_those_that_have_one(form):
    match = rf"^a PackedLinear in '{form}' is not .* Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K\.$"
    with pytest.raises(UnsupportedError, match=match):
        PackedLinear.from_linear(torch.nn.Linear(256, 10), form)
    with pytest.raises(UnsupportedError, match=match):
        PackedLinear.from_bytes(np.zeros(640, np.uint8), form, 10, 16)
    for name in LAYOUTS:
        PackedLinear.from_linear(torch.nn.Linear(256, 2), name)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.norm(random(3, 8), random(7)),
        lambda: ops.norm(random(3, 8), random(8), random(2, 4)),
        lambda: ops.add_norm(random(3, 8), random(2, 8), random(8)),
        lambda: ops.silu_mul(random(3, 8), random(8)),
        lambda: ops.attend(random(1, 3, 2, 8), random(1, 2, 4, 8), random(1, 2, 4, 8)),
        lambda: ops.attend(random(1, 2, 5, 8), random(1, 2, 4, 8), random(1, 2, 4, 8)),
        lambda: ops.attend(random(1, 2, 2, 8), random(1, 2, 4, 8), random(1, 2, 5, 8)),
        lambda: ops.attend(random(1, 2, 2, 8), random(1, 2, 4, 8), random(1, 2, 4, 8).half()),
        lambda: ops.linear_quant(random(2, 128), *arrays(layer_of("Q4_0")[0]), "Q4_0"),
        lambda: ops.linear_quant(random(2, 256), *arrays(layer_of("Q4_0")[0]), "Q9_9"),
        lambda: ops.attend(random(1, 2, 2, 8), random(1, 0, 4, 8), random(1, 0, 4, 8)),
        lambda: ops.attend(*[random(1, 2, 2, 8)] * 3, None, -3),
        lambda: ops.attend(*[random(1, 2, 2, 8)] * 3, None, 0, -1.0),
        lambda: ops.attend(*[random(1, 2, 2, 8).int()] * 3),
        lambda: ops.norm(random(3, 8).long(), random(8)),
        lambda: ops.norm(random(3, 8), random(8).int()),
        lambda: ops.norm(random(3, 8), random(8), None, -1.0),
        lambda: ops.add_norm(random(3, 8).int(), random(3, 8), random(8)),
        lambda: ops.silu_mul(random(3, 8).long(), random(3, 8).long()),
        lambda: ops.linear_quant(random(2, 256).int(), *arrays(layer_of("Q4_0")[0]), "Q4_0"),
    ],
)
def test_operands_that_do_not_fit_are_refused(call):
    with pytest.raises(RuntimeError):
        call()


def misfits(name):
    """(what is wrong, arrays of a layer of that format with it): one is missing, of another shape, dtype or place."""
    for at, array in enumerate(arrays(layer_of(name, columns=512)[0])):
        label = (*ops.ARRAYS, "bias")[at]
        if array is None:
            yield f"{label} too many", at, torch.zeros(8, 24, dtype=torch.int32)
            continue
        if label != "bias":
            yield f"{label} missing", at, None
            yield f"{label} in another dtype", at, array.to(torch.bfloat16)
            yield f"{label} not contiguous", at, array.transpose(0, 1).contiguous().transpose(0, 1)
        yield f"{label} of other rows", at, array[..., :1, :] if label == "words" else array[..., :1]
        yield f"{label} on another device", at, array.to("meta")
        yield f"{label} of other dimensions", at, array[None]
        if label not in ("words", "bias"):
            yield f"{label} of fewer columns", at, array[:-1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_arrays_that_do_not_belong_together_are_refused(name):
    """For real tensors, and for torch.compile and torch.export, which see shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    whole = arrays(layer_of(name, columns=512)[0])
    for problem, at, changed in misfits(name):
        if problem == "words missing":
            continue  # the schema has it
        wrong = [changed if place == at else array for place, array in enumerate(whole)]
        assert is_refused(random(2, 512), *wrong, name), problem
        with FakeTensorMode() as mode:
            fakes = [None if array is None else mode.from_tensor(array) for array in (random(2, 512), *wrong)]
            assert is_refused(*fakes, name), f"{problem}, by shapes alone"


def is_refused(*operands):
    """Whether `linear_quant` refuses them."""
    try:
        ops.linear_quant(*operands)
    except (RuntimeError, NotImplementedError):  # the latter: no kernel for that device
        return True
    return False


@pytest.mark.parametrize(("name", "other"), [("Q8_0", "Q4_0"), ("Q4_0", "Q4_1"), ("Q4_K", "Q5_K"), ("Q6_K", "Q8_0")])
def test_the_arrays_of_another_format_are_refused(name, other):
    with pytest.raises(RuntimeError, match=f"linear_quant: .* of {other}"):
        ops.linear_quant(random(2, 256), *arrays(layer_of(name)[0]), other)


CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.bfloat16),
    "device": lambda m: m.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_casting_a_module_leaves_its_matrix_exact(name):
    layer, x = layer_of(name, bias=False)[0], random(4, 256)
    wanted, dtypes = layer(x), [None if array is None else array.dtype for array in arrays(layer)]
    for cast in CASTS.values():
        model = cast(torch.nn.Sequential(layer_of(name, bias=False)[0]))
        assert [None if array is None else array.dtype for array in arrays(model[0])] == dtypes
        assert torch.equal(model(x), wanted)


def test_a_cast_layer_moves_is_saved_and_has_a_cast_bias():
    layer, _, bias = layer_of("Q4_K")
    layer.bfloat16()
    assert torch.equal(layer.bias, bias.bfloat16())
    other = layer_of("Q4_K", bias=True)[0].bfloat16()
    other.scale.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(random(2, 256)), layer(random(2, 256)))
    empty = layer_of("Q4_K")[0].to_empty(device="meta").bfloat16()
    assert {array.device.type for array in arrays(empty) if array is not None} == {"meta"}
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(random(2, 256)), layer(random(2, 256)))
    cast = {key: value.bfloat16() if value.is_floating_point() else value for key, value in layer.state_dict().items()}
    with pytest.raises(ConfigError, match=r"super_scale was cast to torch\.bfloat16"):
        other.load_state_dict(cast)


PAIRS = [("Q4_0", "Q4_1"), ("Q4_1", "Q4_0"), ("Q4_K", "Q5_K"), ("Q5_K", "Q4_K"), ("Q8_0", "Q6_K")]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_a_state_of_another_format_is_refused_before_anything_is_loaded(name, other):
    layer, state, x = layer_of(name)[0], layer_of(other)[0].state_dict(), random(2, 256)
    before = layer(x)
    with pytest.raises(ConfigError, match=f"saved in {other}, and this one is in {name}: make the model with that"):
        layer.load_state_dict(state, strict=False)
    for older in (torch.tensor([ORDER]), None):  # states that do not say their format
        state["_extra_state"] = older
        if older is None:
            del state["_extra_state"]
        with pytest.raises(ConfigError, match=f"is an array of a layer in another format than {name}"):
            layer.load_state_dict(state, strict=False)
    assert torch.equal(layer(x), before)


def test_a_state_that_does_not_say_its_format_and_a_part_of_a_model_are_loaded():
    layer, other = layer_of("Q4_K")[0], layer_of("Q4_K")[0]
    state = layer.state_dict() | {"_extra_state": torch.tensor([ORDER])}
    other.scale.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.scale, layer.scale)
    assert torch.nn.Sequential(other).load_state_dict({}, strict=False).missing_keys


def test_a_layer_is_exported_by_itself():
    layer, x = layer_of("Q8_0")[0], random(2, 256)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def linear_with(value, width=64):
    linear = torch.nn.Linear(width, 8)
    with torch.no_grad():
        linear.weight[2, 5] = value
    return linear


@pytest.mark.parametrize(("name", "value"), [("Q4_0", 1e6), ("Q4_1", 1e6), ("Q8_0", 1e8), ("Q4_K", 1e8)])
def test_weights_beyond_the_scales_of_a_format_are_refused(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"as large as {value:g} need scales")):
        PackedLinear.from_linear(linear_with(value, 256), name)
    for damage in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="NaN or infinity"):
            PackedLinear.from_linear(linear_with(damage, 256), name)
    kept = PackedLinear.from_linear(linear_with(5e4, 256), name)
    assert torch.isfinite(kept(random(2, 256))).all()


@pytest.mark.parametrize(
    ("name", "top"), [("Q4_0", 1e-7), ("Q4_1", 1e-7), ("Q8_0", 5e-7), ("Q4_K", 5e-6), ("Q5_K", 5e-6), ("Q6_K", 5e-5)]
)
def test_weights_below_the_scales_of_a_format_are_refused(name, top):
    linear = torch.nn.Linear(256, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_(random(8, 256))
        linear.weight *= top / linear.weight.abs().max()
    with pytest.raises(ConfigError, match=rf"at most {top:g} need scales that float16, from 6e-8, .* {name}: keep"):
        PackedLinear.from_linear(linear, name)
    with torch.no_grad():
        linear.weight *= 2000
    x = random(2, 256)
    assert (PackedLinear.from_linear(linear, name)(x) - linear(x)).norm() < 0.2 * linear(x).norm()
    torch.nn.init.zeros_(linear.weight)
    assert not PackedLinear.from_linear(linear, name)(x).any()


class Block(torch.nn.Module):
    """A layer of all our operators."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.down = (layer_of("Q4_0", rows, 64)[0] for rows in (64 + 2 * 32, 64, 64))
        self.gate, self.up = (layer_of("Q4_1", 64, 64)[0] for _ in range(2))
        self.weight = torch.nn.Parameter(random(64), requires_grad=False)

    def forward(self, x):
        h = ops.norm(x, self.weight)
        q, k, v = self.qkv(h).split([64, 32, 32], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (q, k, v))
        out = self.o(ops.attend(q, k, v).transpose(1, 2).flatten(2))
        x, h = ops.add_norm(x, out, self.weight)
        return x + self.down(ops.silu_mul(self.gate(h), self.up(h)))


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_torch_compile_takes_them_whole(backend):
    """fullgraph: a break would raise. The second length is met by dynamic sizes, the third without compiling again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    block = Block()
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (5, 9, 17):
            x = random(2, length, 64, seed=length)
            assert torch.allclose(compiled(x), block(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2
    torch.compiler.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("name", SAMPLES)
def test_a_gpu_computes_what_the_cpu_does(name):
    op, sample = SAMPLES[name]
    wanted, got = op(*sample()), op(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in sample()))
    for a, b in zip(got, wanted, strict=True) if isinstance(got, tuple) else ((got, wanted),):
        assert close(a.cpu(), b)
        assert a.is_cuda
