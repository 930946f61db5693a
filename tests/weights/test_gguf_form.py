"""Value heads in the order of a file, there and back, in formats whose blocks lie within a head and in others."""

from dataclasses import replace

import numpy as np
import pytest

from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.gguf_form import gguf_form, with_heads
from roofline.weights.random_weights import random_checkpoint

CONFIG = {
    **{"family": "qwen3_5", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128},
    **{"vocab": 96, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half", "tied": True},
    **{"max_position": 64, "attention_bias": False, "qk_norm": True, "sliding_window": None, "rotary_dim": 4},
    **{"recurrent": [True, False], "key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 32},
}
OUT = "layers.0.linear.o.weight"


def values_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.dequantize(name) for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def grouped() -> Checkpoint:
    made = random_checkpoint(CONFIG, 0)
    stored = {name: made.read(name).copy() for name in made.tensors}
    return replace(made, bytes_of=stored.__getitem__)


def test_heads_are_moved_there_and_back(grouped: Checkpoint) -> None:
    tiled = with_heads(grouped, tiled=True)
    assert tiled.config["tiled"]
    before, there, back = values_of(grouped), values_of(tiled), values_of(with_heads(tiled, tiled=False))
    moved = {name for name in before if not np.array_equal(before[name], there[name])}
    assert moved == {f"layers.0.linear.{part}.weight" for part in ("qkv", "z", "a", "b", "conv", "a_log", "o")} | (
        moved & {"layers.0.linear.dt_bias.weight"}
    )
    assert all(np.array_equal(before[name], back[name]) for name in before)
    # The second head of three of the first key head lies behind the first of the second one.
    assert np.array_equal(there[OUT][:, 64:96], before[OUT][:, 32:64])
    assert np.array_equal(there["layers.0.linear.z.weight"][32:64], before["layers.0.linear.z.weight"][96:128])
    assert np.array_equal(there["layers.0.linear.conv.weight"][:64], before["layers.0.linear.conv.weight"][:64])
    assert with_heads(grouped, tiled=False) is grouped


@pytest.mark.parametrize(("form", "dim", "written"), [("Q8_0", 32, "Q8_0"), ("Q8_0", 16, "F32"), ("BF16", 16, "BF16")])
def test_a_matrix_is_moved_as_bytes_where_no_block_spans_heads(
    grouped: Checkpoint, form: str, dim: int, written: str
) -> None:
    shape = (64, 6 * dim)
    kind = formats.get(form)
    raw = kind.quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    info = replace(grouped.tensors[OUT], format=form, shape=shape, nbytes=raw.nbytes)
    source = replace(
        grouped, config={**CONFIG, "value_dim": dim}, tensors={OUT: info}, bytes_of=lambda name: raw.reshape(-1)
    )
    tiled = with_heads(source, tiled=True)
    assert tiled.tensors[OUT].format == written
    heads = source.dequantize(OUT).reshape(64, 2, 3, dim)
    assert np.array_equal(tiled.dequantize(OUT), heads.swapaxes(1, 2).reshape(shape))


def test_files_hold_what_decays_are_computed_with(grouped: Checkpoint) -> None:
    name = "layers.0.linear.a_log.weight"
    written = gguf_form(grouped).dequantize(name)
    np.testing.assert_allclose(np.sort(written), np.sort(-np.exp(grouped.dequantize(name))), rtol=1e-6)
