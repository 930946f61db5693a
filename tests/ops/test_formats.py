"""Weight formats: the values ggml's own Python package reads, round trips, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.ops.formats import codebooks, float8

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
    "Q5_0": 0.07,
    "Q5_1": 0.035,
    "Q2_K": 0.45,
    "Q3_K": 0.3,
    "IQ4_NL": 0.12,
    "IQ4_XS": 0.15,
    "MXFP4": 0.26,
    "INT4": 0.14,
    "INT8": 0.005,
    "NF4": 0.16,
}
PACKED = [name for name, form in formats.FORMATS.items() if form.pack is not None]
CONVERTED = [name for name, form in formats.FORMATS.items() if form.packed_as]
IN_GGUF = [name for name, form in formats.FORMATS.items() if form.gguf_type >= 0]


@pytest.mark.parametrize("name", IN_GGUF)
def test_dequantize_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    form = formats.get(name)
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (48, 512 // form.block * form.block_bytes), np.uint8)
    ours = form.dequantize(raw.reshape(-1), (48, 512))
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(form.gguf_type)).reshape(48, 512)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint32), np.ascontiguousarray(theirs[~nan]).view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
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


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-2, 1e2), shift=st.floats(-3, 3))
def test_round_trip_stays_within_the_bound(name: str, seed: int, spread: float, shift: float) -> None:
    form = formats.get(name)
    values = ((np.random.default_rng(seed).uniform(-1, 1, (3, 512)) + shift) * spread).astype(np.float32)
    back = form.dequantize(form.quantize(values), values.shape)
    assert back.dtype == np.float32
    # An affine format whose values all lie on one side of zero spans more than the values do: bound by magnitude.
    assert np.abs(back - values).max() <= BOUNDS[name] * np.abs(values).max() + 1e-30


@pytest.mark.parametrize("name", CONVERTED)
def test_blocks_keep_every_value_in_the_format_that_stands_in(name: str) -> None:
    """With scales of every kind: NaN, infinite, denormal, negative."""
    form, rng = formats.get(name), np.random.default_rng(8)
    raw = rng.integers(0, 256, 1100 * form.block_bytes, np.uint8)  # more than one chunk
    ours = formats.packed(name)
    values = form.dequantize(raw, (1100 * form.block,))
    back = ours.dequantize(formats.packed_bytes(name, raw), values.shape)
    assert np.array_equal(back, values, equal_nan=True)
    assert not formats.packed(ours.name).packed_as


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1"])
def test_codebooks_equal_those_of_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="the oracle is the gguf package")
    theirs = getattr(quants, "IQ1_S" if name == "IQ1" else name)
    theirs.init_grid()
    assert np.array_equal(codebooks.codebook(name), theirs.grid.reshape(theirs.grid_shape))


@pytest.mark.parametrize("name", ["IQ1_S", "TQ1_0", "IQ2_T32"])
def test_formats_that_are_only_read_refuse_to_be_made(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"quantising to {name}"):
        formats.get(name).quantize(np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("code", [0, 1, 2, 127, 254])
def test_exponents_of_mxfp4_reach_beyond_half_precision(code: int) -> None:
    block = np.full((1, 17), 0x21, np.uint8)  # the codes 1 and 2: 1 and 2, doubled
    block[0, 0] = code
    values = formats.get("MXFP4").dequantize(block.reshape(-1), (32,))
    assert values[0] == np.float32(2.0 ** (code - 128))
    assert values[16] == np.float32(2.0 ** (code - 127))


@pytest.mark.parametrize("name", PACKED)
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
    between = np.arange(-27, 28, 2) * 16.0  # of two codes each, up to the last two
    values = np.concatenate([steps, small, between]).astype(np.float32)
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


def test_bf16_rounds_ties_to_even() -> None:
    for upper in range(0x3F80, 0x3F90):
        for lower, more in ((0x7FFF, 0), (0x8000, upper % 2), (0x8001, 1)):
            value = np.array([upper << 16 | lower], np.uint32).view(np.float32)
            assert formats.get("BF16").quantize(value).view(np.uint16) == upper + more


def test_bf16_keeps_nan_and_infinity() -> None:
    form = formats.get("BF16")
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32)
    # A NaN whose payload lies only in the lower half must not become infinity.
    values[0:1].view(np.uint32)[0] = 0x7F800001
    back = form.dequantize(form.quantize(values), (4,))
    assert np.isnan(back[0])
    assert back[1] == np.inf
    assert back[2] == -np.inf


def scales_and_codes(rng: np.random.Generator, top: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of 8 groups in least..63, one of them 63, and codes of which each group has both ends."""
    scales, codes = rng.integers(least, 64, 8), rng.integers(0, top + 1, (8, 32))
    scales[rng.integers(8)] = 63
    codes[:, 3], codes[:, 17] = 0, top
    return scales.astype(np.float32), codes.astype(np.float32)


@pytest.mark.parametrize(("name", "top"), [("Q4_K", 15), ("Q5_K", 31)])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_that_a_block_of_two_scales_can_hold_are_kept(name: str, top: int, seed: int) -> None:
    """Whose least value is a minimum, and whose groups use all codes: every bit of the block is determined."""
    form, rng = formats.get(name), np.random.default_rng(seed)
    scales, codes = scales_and_codes(rng, top, 1)
    minima, _ = scales_and_codes(rng, top, 0)
    d, dmin = np.float32(2.0**-6), np.float32(2.0**-5)
    values = (d * scales[:, None] * codes - dmin * minima[:, None]).reshape(1, 256)
    raw = form.quantize(values)
    assert raw[:4].view(np.float16).tolist() == [d, dmin]
    assert np.array_equal(form.dequantize(raw, (1, 256)), values)


def test_values_that_a_block_of_two_bits_can_hold_are_kept() -> None:
    """Every scale and every minimum; then groups whose least value lies above zero, and above one."""
    form, codes = formats.get("Q2_K"), np.tile(np.float32([3, 0, 1, 2]), (16, 4))
    scales, minima = np.arange(16, dtype=np.float32)[::-1], np.arange(16, dtype=np.float32)
    scales[15], minima[0] = 7, 9  # a group without a step has no codes, and the first has the largest of both
    for d, dmin, least in ((0.25, 0.5, 0), (2.0, 0.0, 1)):
        values = (d * scales[:, None] * codes.clip(least) - dmin * minima[:, None]).astype(np.float32).reshape(1, 256)
        raw = form.quantize(values)
        assert raw[80:].view(np.float16).tolist() == [d, dmin]
        assert np.array_equal(form.dequantize(raw, (1, 256)), values)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_that_a_block_of_signed_scales_can_hold_are_kept(seed: int) -> None:
    form, rng = formats.get("Q6_K"), np.random.default_rng(seed)
    scales, codes = rng.integers(1, 128, 16) * rng.choice([-1, 1], 16), rng.integers(0, 64, (16, 16))
    scales[5] = 127
    codes[:, 9] = 0
    values = (np.float32(2.0**-6) * scales[:, None] * (codes - 32)).astype(np.float32).reshape(1, 256)
    raw = form.quantize(values)
    assert raw[208:].view(np.float16) == 2.0**-6
    assert np.array_equal(raw[192:208].view(np.int8), scales)
    assert np.array_equal(form.dequantize(raw, (1, 256)), values)


@pytest.mark.parametrize(("name", "top"), [("Q4_K", 15), ("Q5_K", 31)])
def test_scales_that_half_precision_cuts_short_end_at_their_largest(name: str, top: int) -> None:
    """The smallest half is 2^-24: 1.4 times of it is stored as one."""
    form, unit = formats.get(name), np.float32(2.0**-24)
    values = np.zeros((1, 256), np.float32)
    values[0, 1::2] = 1.4 * 63 * top * unit
    back = form.dequantize(form.quantize(values), values.shape)
    assert set((back / unit).ravel().tolist()) == {0.0, 63.0 * top}
    values[0, 1::2] = -1.4 * 63 * unit
    back = form.dequantize(form.quantize(values), values.shape)
    assert (back / unit).min() == -63.0


@pytest.mark.parametrize("sign", [1, -1])
def test_signed_scales_that_half_precision_cuts_short_end_at_their_largest(sign: int) -> None:
    form, unit = formats.get("Q6_K"), np.float32(2.0**-24)
    values = np.zeros((1, 256), np.float32)
    values[0, ::2] = -sign * 1.4 * 127 * 32 * unit
    values[0, 1::4] = sign * 1.39 * 127 * 32 * unit
    back = form.dequantize(form.quantize(values), values.shape)
    scale = 127 if sign > 0 else -128
    assert set((back / unit).ravel().tolist()) == {-32.0 * scale, 0.0, 31.0 * scale}


def test_sizes_are_whole_blocks_of_rows() -> None:
    form = formats.get("Q4_0")
    assert form.nbytes((64,)) == 2 * 18
    assert form.nbytes((3, 5, 64)) == 30 * 18
    with pytest.raises(ConfigError, match=r"shape \(\) cannot be Q4_0"):
        form.nbytes(())
    with pytest.raises(ConfigError, match="takes 36 bytes, got 36"):
        form.dequantize(np.zeros(36, np.int8), (64,))


def test_blocks_of_a_format_from_outside_are_converted_or_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Z8 is Q8_0 with the scale behind the integers."""
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))
    eight = formats.get("Q8_0")
    values = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    raw = eight.quantize(values)
    turned = np.roll(raw.reshape(-1, 34), -2, axis=1).reshape(-1)

    def back(blocks: np.ndarray) -> np.ndarray:
        assert blocks.shape == (6, 34)
        return np.roll(blocks, 2, axis=1)

    def form(name: str, packed_as: str, **options: object) -> formats.Format:
        unpack = lambda blocks: eight.unpack(back(blocks))  # noqa: E731
        return formats.Format(name, 32, 34, -1, unpack, eight.pack, packed_as, **options)  # type: ignore[arg-type]

    formats.register(form("Z8", "Q8_0", convert=back))
    assert formats.readable()[-1] == "Z8"
    formats.register(form("Z8_wide", "F32"))  # two without a number in GGUF files
    formats.register(form("Z8_narrow", "BF16"))
    assert (formats.packed("Z8"), formats.packed("Q8_0")) == (eight, eight)
    assert np.array_equal(formats.packed_bytes("Z8", turned), raw)
    assert formats.packed_bytes("Z8", turned).shape == raw.shape
    assert formats.packed_bytes("Q8_0", raw) is raw
    wide = formats.packed_bytes("Z8_wide", turned)
    assert np.array_equal(wide.view(np.float32), eight.dequantize(raw, (3 * 64,)))
    with pytest.raises(ConfigError, match="Z8_narrow is declared packed_as BF16, which cannot hold all"):
        formats.packed_bytes("Z8_narrow", turned)
    turned[32:34] = np.array([np.nan], np.float16).view(np.uint8)
    assert np.isnan(formats.packed_bytes("Z8_wide", turned).view(np.float32)[:32]).all()
    for wrong, reason in (
        (form("Z8", "F32"), "named 'Z8' is already"),
        (form("Z 9", "F32"), "cannot be named 'Z 9'"),
        (form("Z9", "Z8"), "Z8 is itself Q8_0"),
        (form("Z9", "Q8_0"), "needs `convert`"),
        (formats.Format("Z9", 32, 34, 0, back, back, "F32"), r"of GGUF type 0 \(F32\) is already"),
    ):
        with pytest.raises(ConfigError, match=reason):
            formats.register(wrong)


def test_readable_formats_are_those_that_files_have() -> None:
    """The others only stand in for these in memory: they have no number in GGUF files, and nothing makes them."""
    files = {name for name, form in formats.FORMATS.items() if form.gguf_type >= 0 or form.pack is not None}
    assert set(formats.readable()) == files


def test_refusals_name_the_cause() -> None:
    with pytest.raises(UnsupportedError, match=r"Q8_K.*Q4_K"):
        formats.get("Q8_K")
    with pytest.raises(ConfigError, match="multiples of 32"):
        formats.get("Q4_0").nbytes((4, 33))
    with pytest.raises(ConfigError, match="takes 72 bytes, got 71"):
        formats.get("Q4_0").dequantize(np.zeros(71, np.uint8), (2, 64))
