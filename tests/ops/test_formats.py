"""Weight formats: the values ggml's own Python package reads, round trips, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.ops.formats import float8

# Largest error of a round trip, as a share of the largest magnitude of the tensor. Affine formats with n codes err by
# half a step (range / 2n), plus what their own scales are rounded by.
BOUNDS = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.006,
    "Q4_0": 0.13,
    "Q4_1": 0.07,
    "Q4_K": 0.12,
    "Q5_K": 0.07,
    "Q6_K": 0.04,
    "E4M3": 2**-4,
}
IN_GGUF = [name for name, form in formats.FORMATS.items() if form.gguf_type >= 0]


@pytest.mark.parametrize("name", IN_GGUF)
def test_dequantize_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    form = formats.get(name)
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (6, 512 // form.block * form.block_bytes), np.uint8)
    ours = form.dequantize(raw.reshape(-1), (6, 512))
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(form.gguf_type)).reshape(6, 512)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint32), np.ascontiguousarray(theirs[~nan]).view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantize_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    form = formats.get(name)
    values = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    values[0] = 0
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType(form.gguf_type))
    assert np.array_equal(form.quantize(values), theirs.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", IN_GGUF)
def test_row_facts_equal_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    form = formats.get(name)
    kind = gguf.GGMLQuantizationType[name]
    assert form.gguf_type == kind.value
    assert (form.block, form.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", formats.FORMATS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-2, 1e2), shift=st.floats(-3, 3))
def test_round_trip_stays_within_the_bound(name: str, seed: int, spread: float, shift: float) -> None:
    form = formats.get(name)
    values = ((np.random.default_rng(seed).uniform(-1, 1, (3, 512)) + shift) * spread).astype(np.float32)
    back = form.dequantize(form.quantize(values), values.shape)
    assert back.dtype == np.float32
    # An affine format whose values all lie on one side of zero spans more than the values do: bound by magnitude.
    assert np.abs(back - values).max() <= BOUNDS[name] * np.abs(values).max() + 1e-30


@pytest.mark.parametrize("name", formats.FORMATS)
def test_zeros_stay_zero(name: str) -> None:
    form = formats.get(name)
    zeros = np.zeros((2, 256), np.float32)
    assert not form.dequantize(form.quantize(zeros), zeros.shape).any()


def test_8_bit_floats_are_torch_s() -> None:
    """Every code, and the rounding of values of every size, ties and subnormals among them."""
    torch = pytest.importorskip("torch", reason="the oracle is torch")
    form = formats.get("E4M3")
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    ones = np.ones((2, 1), np.float32)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(form.dequantize(float8.join(codes, ones), (2, 128)), theirs, equal_nan=True)
    assert all(
        np.array_equal(a, b) for a, b in zip(float8.split(float8.join(codes, ones), 2), (codes, ones), strict=True)
    )
    steps = np.arange(-448 * 2**11, 448 * 2**11 + 1, 7 * 2**7, dtype=np.int64) / 2.0**11
    small = np.arange(-1024, 1024) / 2.0**13
    values = np.concatenate([steps, small]).astype(np.float32)
    values = np.concatenate([values, np.zeros(-len(values) % 127, np.float32)]).reshape(-1, 127)
    values = np.concatenate([values, np.full((len(values), 1), 448, np.float32)], axis=1)  # so that the scale is 1
    stored, scale = float8.split(form.quantize(values), len(values))
    assert (scale == 1).all()
    assert np.array_equal(stored, torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    values[1, 1] = np.nan
    assert np.isnan(form.dequantize(form.quantize(values), values.shape)[1]).all()


def test_chunks_do_not_change_values() -> None:
    form = formats.get("Q4_1")
    values = np.random.default_rng(1).standard_normal((1300, 512)).astype(np.float32)  # more than two chunks
    whole = form.quantize(values)
    rows = np.concatenate([form.quantize(row) for row in values])
    assert np.array_equal(whole, rows)
    assert np.array_equal(
        form.dequantize(whole, values.shape)[777], form.dequantize(form.quantize(values[777]), (512,))
    )


def test_bf16_keeps_nan_and_infinity() -> None:
    form = formats.get("BF16")
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32)
    # A NaN whose payload lies only in the lower half must not become infinity.
    values[0:1].view(np.uint32)[0] = 0x7F800001
    back = form.dequantize(form.quantize(values), (4,))
    assert np.isnan(back[0])
    assert back[1] == np.inf
    assert back[2] == -np.inf


def test_refusals_name_the_cause() -> None:
    with pytest.raises(UnsupportedError, match=r"Q2_K.*Q4_K"):
        formats.get("Q2_K")
    with pytest.raises(ConfigError, match="multiples of 32"):
        formats.get("Q4_0").nbytes((4, 33))
    with pytest.raises(ConfigError, match="takes 72 bytes, got 71"):
        formats.get("Q4_0").dequantize(np.zeros(71, np.uint8), (2, 64))
