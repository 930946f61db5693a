"""Single kernels against slow arithmetic, and bit for bit against each other: instruction sets, row counts, tiles."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import ops
from roofline.ops import formats

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")

ISAS = native.isas()
QUANTISED = tuple(name for name in native.format_names() if formats.get(name).integers is not None)
FLOATS = ("F32", "F16", "BF16", "E4M3", "NF4")  # multiplied with float rows
CASES = [(name, 1) for name in QUANTISED + FLOATS] + [(name, 2) for name in QUANTISED]  # format, digits


@dataclass
class Matrix:
    """A random weight in a file format, and packed."""

    name: str
    rows: int
    columns: int
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        form = formats.get(self.name)
        if form.pack is None:
            self.raw = table_blocks(rng, self.rows * self.columns // form.block, form.block_bytes)
        else:
            self.raw = form.quantize(rng.standard_normal((self.rows, self.columns), dtype=np.float32))
        self.number = native.format_names().index(self.name)
        tiles = -(-self.rows // 16)
        self.memory = native.Memory(tiles * native.tile_bytes(self.number, self.columns))
        native.pack(self.number, self.raw, self.rows, self.columns, self.memory.address, 2)

    @property
    def values(self) -> np.ndarray:
        """float64 [rows, columns], from the file's own bytes."""
        return formats.get(self.name).dequantize(self.raw, (self.rows, self.columns)).astype(np.float64)

    def times(self, isa: str, x: np.ndarray, digits: int = 1) -> np.ndarray:
        y = np.full((len(x), self.rows), np.nan, np.float32)
        native.kernels.linear(isa, self.number, self.memory.address, self.rows, self.columns, x, y, digits)
        return y


def table_blocks(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Random blocks of a format that is never made: a small scale, any factors and codes. uint8 [count * size]."""
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    blocks[:, :4] = (rng.standard_normal((count, 1)).astype(np.float32) * np.float32(2.0**-10)).view(np.uint8)
    return blocks.reshape(-1)


SILU, GELU, GELU_TANH = range(3)  # native/kernels.h


def quantise(isa: str, x: np.ndarray, digits: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers [tokens, k], scales and scaled sums float32 [tokens, k / 32]."""
    q = np.empty((digits, *x.shape), np.int8)
    scale, total = (np.empty((len(x), x.shape[1] // 32), np.float32) for _ in range(2))
    native.kernels.quantise(isa, x, x.shape[1], q, scale, total, digits)
    return (q[0] if digits == 1 else q[0].astype(np.int16) * 128 + q[1]), scale, total


def activations(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "digits"), CASES)
def test_linear_equals_the_files_weights(isa: str, name: str, digits: int) -> None:
    matrix, x = Matrix(name, 48, 512), activations(3, 512)
    used = x.astype(np.float64)
    if name in QUANTISED:
        q, scale, _ = quantise(isa, x, digits)
        used = q.astype(np.float64) * np.repeat(scale.astype(np.float64), 32, axis=1)
    wanted = used @ matrix.values.T
    size = np.abs(used) @ np.abs(matrix.values).T
    assert np.max(np.abs(matrix.times(isa, x, digits) - wanted) / size) < 1e-5


@pytest.mark.parametrize("name", QUANTISED)
def test_linear_is_its_order(name: str) -> None:
    """Every rounding of "q8g32", groups of 32 and of 16, minima and tables."""
    torch = pytest.importorskip("torch", reason="the orders are written in torch")
    from roofline.backends.reference.orders import linear_integers
    from roofline.backends.reference.unpack import unpack
    from roofline.ops import quantize_rows

    matrix, x = Matrix(name, 24, 512), activations(3, 512)
    wanted = linear_integers(quantize_rows(torch.from_numpy(x)), unpack(matrix.raw, name, (24, 512)))
    np.testing.assert_array_equal(matrix.times(ISAS[0], x), wanted.numpy())


@pytest.mark.parametrize(("name", "digits"), CASES)
@pytest.mark.parametrize("shape", [(16, 256), (40, 256), (100, 512), (7, 768)])
def test_linear_bits_do_not_depend_on_rows_or_isa(name: str, digits: int, shape: tuple[int, int]) -> None:
    matrix, x = Matrix(name, *shape), activations(23, shape[1])
    alone = np.concatenate([matrix.times(ISAS[0], x[i : i + 1], digits) for i in range(len(x))])
    for isa in ISAS:
        for count in (2, 3, 4, 5, 7, 8, 11, 16, 23):
            assert matrix.times(isa, x[:count], digits).tobytes() == alone[:count].tobytes(), (isa, count)


@pytest.mark.parametrize("name", QUANTISED + FLOATS)
def test_embedding_rows_are_the_files_rows(name: str) -> None:
    matrix = Matrix(name, 40, 256)
    ids = np.array([0, 1, 15, 16, 39], np.int32)
    for isa in ISAS:
        out = np.empty((len(ids), 256), np.float32)
        native.kernels.embed(isa, matrix.number, matrix.memory.address, 256, ids, out)
        np.testing.assert_array_equal(out, matrix.values[ids].astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), exponent=st.integers(-30, 30), zeros=st.booleans(), digits=st.integers(1, 2))
def test_quantise_is_the_declared_rounding(seed: int, exponent: int, zeros: bool, digits: int) -> None:
    x = activations(2, 96, seed) * np.float32(2.0**exponent)
    if zeros:
        x[:, 32:64] = 0
    groups = x.reshape(2, 3, 32)
    amax = np.abs(groups).max(axis=2)
    limit = np.float32(127 if digits == 1 else 127 * 128)
    inverse = np.divide(limit, amax, out=np.zeros_like(amax), where=amax > 0)
    wanted = np.rint(groups * inverse[:, :, None]).astype(np.int16).reshape(2, 96)
    scale = (amax / limit).astype(np.float32)
    total = scale * wanted.reshape(2, 3, 32).sum(axis=2, dtype=np.int32).astype(np.float32)
    for isa in ISAS:
        q, s, z = quantise(isa, x, digits)
        np.testing.assert_array_equal(q, wanted)
        np.testing.assert_array_equal(s, scale)
        np.testing.assert_array_equal(z, total)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_stays_visible(bad: float) -> None:
    x = activations(2, 64)
    x[1, 40] = bad
    matrix = Matrix("Q4_1", 16, 64)
    for isa in ISAS:
        y = matrix.times(isa, x)
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()


@pytest.mark.parametrize("width", [16, 64, 100, 576])
def test_rms_norm(width: int) -> None:
    x, w = activations(3, width), activations(1, width, 2)[0]
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * w
    outs = []
    for isa in ISAS:
        out = np.empty_like(x)
        native.kernels.rms_norm(isa, x, w, 1e-5, out)
        np.testing.assert_allclose(out, wanted, rtol=3e-6, atol=1e-7)
        outs.append(out.tobytes())
    assert len(set(outs)) == 1


def test_silu_is_close_and_the_same_everywhere() -> None:
    gate = np.concatenate([np.linspace(-90, 90, 1000), [0.0, 200, -200]]).astype(np.float32)
    up = activations(1, len(gate))[0]
    alone = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    outs = []
    for isa in ISAS:
        for expected, operands in ((alone, (gate,)), (alone * up, (gate, up))):
            out = np.empty_like(gate)
            (native.kernels.gated if len(operands) == 2 else native.kernels.activate)(isa, SILU, *operands, out)
            np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-12)  # far below, x * log2(e) is rounded
            outs.append(out.tobytes())
    assert len(set(outs)) == 2


@pytest.mark.parametrize("width", [1, 16, 100, 576])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_is_its_order(width: int, biased: bool) -> None:
    torch = pytest.importorskip("torch", reason="the reference runs on torch")
    from roofline.backends.reference.orders import layer_norm_lanes16

    x, w = activations(5, width) * 3 + 7, activations(1, width, 2)[0]
    bias = activations(1, width, 3)[0] if biased else np.empty(0, np.float32)
    given = [None if part.size == 0 else torch.from_numpy(part) for part in (x, w, bias)]
    wanted = layer_norm_lanes16(*given, 1e-5).numpy()
    close = torch.nn.functional.layer_norm(given[0].double(), (width,), given[1].double(), None, 1e-5).numpy()
    np.testing.assert_allclose(wanted, close + (bias if biased else 0), rtol=1e-5, atol=2e-5)  # it cancels around 7
    for isa in ISAS:
        out = np.empty_like(x)
        native.kernels.layer_norm(isa, x, w, bias, 1e-5, out)
        assert out.tobytes() == wanted.tobytes(), isa


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_is_its_order_and_close(tanh: bool) -> None:
    torch = pytest.importorskip("torch", reason="the reference runs on torch")
    from roofline.backends.reference.orders import gelu_exp2

    x = np.concatenate([np.linspace(-14, 14, 20001), activations(1, 5000)[0], [0, 200, -200, 1e30, 1e-30]])
    x = x.astype(np.float32)
    wanted = gelu_exp2(torch.from_numpy(x), tanh).numpy()
    exact = torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate="tanh" if tanh else "none").numpy()
    assert (np.abs(wanted - exact) <= 1.5e-7 * np.maximum(1, np.abs(x))).all()
    tail = (x < 0) & (x > -6)  # where 1 + erf(x) has nothing left of its digits
    assert (np.abs(wanted - exact)[tail] <= 5e-6 * np.abs(exact)[tail]).all()
    up = activations(1, len(x), 3)[0]
    normal = np.abs(wanted) >= 2.0**-126  # smaller numbers are zeros in the kernels
    for isa in ISAS:
        out, gated = np.empty_like(x), np.empty_like(x)
        native.kernels.activate(isa, GELU_TANH if tanh else GELU, x, out)
        assert out[normal].tobytes() == wanted[normal].tobytes(), isa
        assert not out[~normal].any()
        native.kernels.gated(isa, GELU_TANH if tanh else GELU, x, up, gated)
        product = out * up
        assert gated[np.abs(product) >= 2.0**-126].tobytes() == product[np.abs(product) >= 2.0**-126].tobytes(), isa


@pytest.mark.parametrize("size", [1, 15, 16, 4007])
def test_clamped_swiglu_is_its_order(size: int) -> None:
    torch = pytest.importorskip("torch", reason="the reference runs on torch")
    from roofline.backends.reference.orders import clamped_swiglu_exp2

    gate, up = activations(1, size, 5)[0] * 4, activations(1, size, 6)[0] * 4
    gate[-1], up[: size // 9] = -40.0, -8.0
    wanted = clamped_swiglu_exp2(torch.from_numpy(gate), torch.from_numpy(up), 7.0).numpy()
    exact = ops.clamped_swiglu(torch.from_numpy(gate).double(), torch.from_numpy(up).double(), 7.0).numpy()
    assert np.abs(wanted - exact).max() < 1e-5
    for isa in ISAS:
        out = np.empty_like(gate)
        native.kernels.clamped_swiglu(isa, gate, up, 7.0, out)
        assert out.tobytes() == wanted.tobytes(), isa
        special = np.array([np.nan, 1.0, np.inf, -np.inf, np.inf], np.float32)
        other = np.array([1.0, np.nan, np.inf, 1.0, -np.inf], np.float32)
        native.kernels.clamped_swiglu(isa, special, other, 7.0, out := np.empty_like(special))
        assert np.isnan(out[:2]).all(), isa
        np.testing.assert_allclose(out[[2, 4]], [7 * 8, -6 * 7], rtol=1e-4)


@pytest.mark.parametrize("kind", [SILU, GELU, GELU_TANH])
def test_an_activation_keeps_what_is_not_finite_visible(kind: int) -> None:
    x = np.array([np.nan, np.inf, 1.0], np.float32)
    for isa in ISAS:
        out = np.empty_like(x)
        native.kernels.activate(isa, kind, x, out)
        assert np.isnan(out[0])
        assert out[1] == np.inf


def test_exp2_is_close_and_the_same_everywhere() -> None:
    x = np.concatenate([np.linspace(-130, 0, 65536), [-np.inf] * 16]).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    outs = []
    for isa in ISAS:
        out = np.empty_like(x)
        native.kernels.exp2(isa, x, out)
        normal = x >= -126
        np.testing.assert_allclose(out[normal], np.exp2(x[normal].astype(np.float64)), rtol=3e-7)
        assert (out[~normal] == 0).all()
        outs.append(out.tobytes())
    assert len(set(outs)) == 1


def test_pack_refuses_bytes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="do not match"):
        native.pack(native.format_names().index("Q4_1"), np.zeros(10, np.uint8), 16, 64, native.Memory(4096).address, 1)
