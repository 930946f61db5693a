"""Rounding loses less than the plain packers do, and the mixes are those of llama.cpp's quantiser."""

import re
from pathlib import Path

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.models.mixes import MIXES, formats_of, mix_of
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.files.mapped import as_bytes, forget, map_file
from roofline.weights.quantise.rounding import inverse_factor, round_to
from roofline.weights.rope_rows import TurnedHeads, reorder

ROUNDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def _error(form: str, values: np.ndarray, raw: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    return float((weights * (formats.get(form).dequantize(raw, values.shape) - values) ** 2).sum())


def _weights(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((64, 512)) * rng.gamma(2, 0.02, (64, 1))).astype(np.float32)


@pytest.mark.parametrize("form", ROUNDED)
def test_the_search_loses_less_than_the_plain_packer(form):
    values = _weights()
    assert _error(form, values, round_to(form, values)) < 0.95 * _error(
        form, values, formats.get(form).quantize(values)
    )


@pytest.mark.parametrize("form", ROUNDED)
def test_columns_that_count_more_lose_less(form):
    values = _weights(1)
    importance = np.where(np.arange(512) % 8 == 0, 20, 0.05).astype(np.float32)
    plain, weighed = round_to(form, values), round_to(form, values, importance)
    assert _error(form, values, weighed, importance) < 0.9 * _error(form, values, plain, importance)


def _inputs(rows: int = 2000) -> np.ndarray:
    """float32 [rows, 512]: columns that are alike, as a model's are."""
    rng = np.random.default_rng(5)
    mixed = rng.standard_normal((rows, 64)) @ rng.standard_normal((64, 512)) / 8
    return (mixed + 0.3 * rng.standard_normal((rows, 512))).astype(np.float32)


@pytest.mark.parametrize("form", ROUNDED)
def test_errors_that_later_columns_make_up_for_change_the_product_less(form):
    values, x = _weights(2), _inputs()
    importance = (x * x).mean(axis=0)
    products = []
    for factor in (None, inverse_factor(x.T @ x)):
        raw = round_to(form, values, importance, factor)
        difference = formats.get(form).dequantize(raw, values.shape) - values
        products.append(float(((x @ difference.T) ** 2).sum()))
    assert products[1] < 0.5 * products[0]


@pytest.mark.parametrize("form", ROUNDED)
def test_columns_that_nothing_connects_are_rounded_each_by_itself(form):
    values = _weights(3)
    apart = inverse_factor(np.diag(np.arange(1, 513, dtype=np.float32)))
    assert np.array_equal(round_to(form, values, None, apart), round_to(form, values))


def test_a_factor_is_the_root_of_the_damped_inverse():
    x = _inputs()
    damped = (x.T @ x).astype(np.float64)
    damped += 0.01 * np.trace(damped) / 512 * np.eye(512)
    factor = inverse_factor(x.T @ x).astype(np.float64)
    assert np.array_equal(factor, np.triu(factor))
    assert np.abs(factor.T @ factor @ damped - np.eye(512)).max() < 1e-3
    assert np.isfinite(inverse_factor(np.zeros((8, 8), np.float32))).all(), "of a matrix that no row came to"


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.filterwarnings("error")
def test_blocks_of_any_kind_come_back_finite(form):
    values = np.zeros((8, 256), np.float32)
    values[1], values[2], values[3] = 0.5, -1e-30, 3e4
    values[4] = np.abs(_weights()[0, :256])
    values[5] = -values[4]
    values[6, 17] = 1.0
    values[7] = 1e-20
    back = formats.get(form).dequantize(round_to(form, values), values.shape)
    assert np.isfinite(back).all()
    assert (back[0] == 0).all()
    for row in (1, 3, 4, 5, 6):
        assert np.abs(back[row] - values[row]).max() <= 0.1 * np.abs(values[row]).max()


def test_values_that_a_format_holds_stay_as_they_are():
    raw = formats.get("Q8_0").quantize(_weights())
    values = formats.get("Q8_0").dequantize(raw, (64, 512))
    assert np.array_equal(round_to("Q8_0", values), raw)
    few = np.tile(np.arange(-8, 8, dtype=np.float32), (4, 16)) / 16
    for form in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"):
        back = formats.get(form).dequantize(round_to(form, few), few.shape)
        assert np.abs(back - few).max() < 0.005, form


def _config(**changes: object) -> dict[str, object]:
    config = {"family": "llama", "width": 512, "layers": 16, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 768}
    config |= {"vocab": 100, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half"}
    config |= {"max_position": 512, "tied": False, "attention_bias": False, "qk_norm": False, "sliding_window": None}
    return config | changes


def _kinds(mix: str, **changes: object) -> dict[str, str]:
    return formats_of(mix, names.parameter_shapes(_config(**changes)))


def test_a_mix_spends_bits_where_llama_cpp_does():
    kinds = _kinds("Q4_K_M")
    finer = [i for i in range(16) if kinds[f"layers.{i}.attn.v.weight"] == "Q6_K"]
    assert finer == [0, 1, 4, 7, 10, 13, 14, 15]
    assert finer == [i for i in range(16) if kinds[f"layers.{i}.mlp.down.weight"] == "Q6_K"]
    assert kinds["head.weight"] == "Q6_K"
    assert kinds["embed.weight"] == "Q4_K"
    assert kinds["layers.0.attn.q.weight"] == "Q4_K"
    assert kinds["layers.0.attn_norm.weight"] == "F32"
    small = _kinds("Q4_K_S")
    assert [i for i in range(16) if small[f"layers.{i}.attn.v.weight"] == "Q5_K"] == [0, 1, 2, 3]
    assert [i for i in range(16) if small[f"layers.{i}.mlp.down.weight"] == "Q5_K"] == [0, 1]
    large = _kinds("Q4_K_M", layers=80, heads=64, kv_heads=8, head_dim=8)
    assert large["layers.11.attn.v.weight"] == "Q5_K"
    assert large["layers.11.mlp.down.weight"] == "Q4_K"


def test_a_joined_matrix_of_attention_is_finer_and_learned_positions_stay():
    shapes = {
        "layers.0.attn.qkv.weight": (1536, 512),
        "positions.weight": (64, 512),
        "layers.0.mlp.up.weight": (768, 512),
    }
    kinds = [list(formats_of(mix, shapes).values()) for mix in ("Q4_K_M", "Q5_K_M", "Q4_K_S", "Q8_0")]
    assert [each[0] for each in kinds] == ["Q5_K", "Q6_K", "Q4_K", "Q8_0"]
    assert [each[1] for each in kinds] == ["F32"] * 4
    assert [each[2] for each in kinds] == ["Q4_K", "Q5_K", "Q4_K", "Q8_0"]


def test_layers_with_recurrent_state_have_the_formats_of_llama_cpp() -> None:
    """The taps of the convolution stay floats, and q, k and v in one matrix are finer than the others."""
    layer = {"qkv": (6144, 1024), "z": (2048, 1024), "b": (16, 1024), "conv": (6144, 4), "o": (1024, 2048)}
    shapes = {f"layers.0.linear.{name}.weight": shape for name, shape in layer.items()}
    kinds = {mix: [*formats_of(mix, shapes).values()] for mix in ("Q4_0", "Q4_K_M", "Q5_K_M", "BF16")}
    assert kinds["Q4_0"] == ["Q4_0", "Q4_0", "Q4_0", "F32", "Q4_0"]
    assert kinds["Q4_K_M"] == ["Q5_K", "Q4_K", "Q4_K", "F32", "Q4_K"]
    assert kinds["Q5_K_M"] == ["Q6_K", "Q5_K", "Q5_K", "F32", "Q5_K"]
    assert kinds["BF16"] == ["BF16", "BF16", "BF16", "F32", "BF16"]


def test_attention_of_eight_experts_is_finer_where_that_is_more_bits():
    shapes = {"layers.0.mlp.router.weight": (8, 512)}
    shapes |= {f"layers.0.attn.{name}.weight": (512, 512) for name in "kvo"}
    kinds = {mix: [*formats_of(mix, shapes).values()] for mix in ("Q4_K_M", "Q5_K_M", "Q8_0", "F16")}
    assert kinds["Q4_K_M"] == ["F32", "Q8_0", "Q8_0", "Q5_K"]
    assert kinds["Q5_K_M"] == ["F32", "Q8_0", "Q8_0", "Q5_K"]
    assert kinds["Q8_0"] == ["F32", "Q8_0", "Q8_0", "Q8_0"]
    assert kinds["F16"] == ["F32", "F16", "F16", "F16"]


def test_widths_that_are_no_multiple_get_smaller_blocks():
    kinds = _kinds("Q5_K_M", width=576, head_dim=72, tied=True)
    assert kinds["embed.weight"] == "Q8_0"
    assert kinds["layers.0.attn.v.weight"] == "Q8_0"
    assert kinds["layers.0.attn.q.weight"] == "Q5_1"
    assert kinds["layers.3.mlp.down.weight"] == "Q5_K"
    assert _kinds("Q4_K_M", width=576, head_dim=72)["layers.0.mlp.up.weight"] == "Q5_0"
    assert _kinds("Q4_0", width=40, head_dim=6, ffn=64)["layers.0.attn.q.weight"] == "F16"


def test_names_of_formats():
    assert [mix_of(name) for name in ("q4", "gguf:q4_k_m", "Q8_0", "bf16")] == ["Q4_K_M", "Q4_K_M", "Q8_0", "BF16"]
    with pytest.raises(ConfigError, match=r"there is no format 'gguf:Q4_K_L'.*did you mean 'Q4_K_"):
        mix_of("gguf:Q4_K_L")
    assert all(mix_of(name) == name for name in MIXES)


def test_rows_come_back_from_pairs():
    raw = np.arange(4 * 8 * 3, dtype=np.uint8)  # 4 heads of 8 rows, 3 bytes each
    pairs = reorder(raw, 32, TurnedHeads(4), "interleaved")
    rows = pairs.reshape(32, 3)[:, 0] // 3
    assert rows[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.array_equal(reorder(pairs, 32, TurnedHeads(4), "half"), raw)


def test_rows_that_do_not_turn_stay():
    raw = np.arange(4 * 8 * 3, dtype=np.uint8)  # 4 heads of 8 rows, 3 bytes each
    pairs = reorder(raw, 32, TurnedHeads(4, 4), "interleaved")
    rows = pairs.reshape(32, 3)[:, 0] // 3
    assert rows[:8].tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert np.array_equal(reorder(pairs, 32, TurnedHeads(4, 4), "half"), raw)


def test_pages_of_a_file_that_were_read_leave_memory(tmp_path):
    def resident() -> int:
        return int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # KiB

    (tmp_path / "data").write_bytes(b"\1" * (32 << 20))
    data = as_bytes(map_file(tmp_path / "data"))
    assert int(data.sum(dtype=np.int64)) == 32 << 20
    before = resident()
    forget(data[4096 + 5 :])
    assert before - resident() > 30 << 10
    assert data[-1] == 1  # and is read again
    forget(np.ones(5))  # no file
