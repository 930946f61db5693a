"""Random weights: a function of seed and name alone."""

import math

import numpy as np
import pytest
from weights_builders import CONFIG

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.presets import preset
from roofline.ops import formats
from roofline.weights import names, random_weights
from roofline.weights.random_weights import parse, preset_checkpoint, random_checkpoint, random_values


def test_same_seed_same_bytes_in_any_order() -> None:
    first, second = random_checkpoint(CONFIG, 7), random_checkpoint({**CONFIG, "layers": 3}, 7)
    for name in reversed(list(first.tensors)):
        assert np.array_equal(first.read(name), second.read(name))
    assert not np.array_equal(first.read("embed.weight"), random_checkpoint(CONFIG, 8).read("embed.weight"))
    assert not np.array_equal(first.read("layers.0.attn.q.weight"), first.read("layers.1.attn.q.weight"))


def test_stream_is_fixed_for_ever() -> None:
    values = random_values("layers.0.attn.q.weight", (2, 3), 1)
    # Written down once: another numpy, another machine, must give the same bits.
    expected = [[1040849232, 1053013032, 1055327724], [1063462924, 1057875426, 1054565956]]
    assert values.view(np.uint32).tolist() == expected


def test_scales_and_kinds() -> None:
    config = {**CONFIG, "family": "qwen", "attention_bias": True, "rope_style": "half"}
    checkpoint = random_checkpoint(config, 3)
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == names.parameter_shapes(config)
    assert {t.format for t in checkpoint.tensors.values()} == {"BF16"}
    assert checkpoint.kind == "random"
    assert checkpoint.config == config
    assert checkpoint.config["family"] == "qwen"
    checkpoint.check_names(names.parameter_shapes(config))
    down = checkpoint.dequantize("layers.0.mlp.down.weight")
    assert down.std() * math.sqrt(96) == pytest.approx(1, rel=0.05)
    assert abs(down.mean()) * math.sqrt(96) < 0.05
    assert (checkpoint.dequantize("layers.0.attn_norm.weight") == 1).all()
    bias = checkpoint.dequantize("layers.0.attn.q.bias")
    assert 0.033 < np.abs(bias).max() < 0.0348  # 0.02 times the root of 3, rounded to BF16
    with pytest.raises(ConfigError, match="no tensor 'x'"):
        checkpoint.read("x")


PACKED = [name for name in formats.readable() if formats.get(name).pack is not None]
# The widest gap of a format's codes beside the largest value: 0.16 is NF4's; fewer bits have wider ones.
GAPS = {"Q2_K": 0.4, "Q3_K": 0.3}


@pytest.mark.parametrize("form", PACKED)
def test_every_format(form: str) -> None:
    config = {**CONFIG, "width": 256, "head_dim": 64, "ffn": 512}
    checkpoint = random_checkpoint(config, 1, form)
    info = checkpoint.tensors["layers.0.mlp.up.weight"]
    assert info.format == form
    assert checkpoint.read(info.name).size == info.nbytes
    assert checkpoint.tensors["final_norm.weight"].format == (form if formats.get(form).block == 1 else "F32")
    exact = random_values(info.name, info.shape, 1)
    assert np.abs(checkpoint.dequantize(info.name) - exact).max() < GAPS.get(form, 0.16) * np.abs(exact).max()


@pytest.mark.parametrize(
    ("name", "floats"),
    [
        ("qwen3.5-0.8b", {"conv.weight": "F32"}),
        ("granite-4.0-h-350m", {"conv.weight": "F32"}),
        ("lfm2-350m", {"conv.weight": "F32"}),
        ("mamba-130m", {"conv.weight": "F32", "a_log.weight": "F32", "dt.weight": "F16"}),
        ("falcon-h1-0.5b", {"conv.weight": "F32"}),
        ("mamba-codestral-7b", {"conv.weight": "F32"}),
    ],
)
def test_matrices_of_hybrids_that_are_no_whole_blocks_stay_floats(name: str, floats: dict[str, str]) -> None:
    """These are the formats of such tensors in files that llama.cpp's quantiser writes."""
    tensors = random_checkpoint(preset(name), 7, "Q4_0").tensors
    matrices = {tensor: info.format for tensor, info in tensors.items() if len(info.shape) > 1}
    told = {tensor.split(".")[-2] + ".weight": form for tensor, form in matrices.items() if form != "Q4_0"}
    assert told == floats
    assert {info.format for info in tensors.values() if len(info.shape) == 1} == {"F32"}


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"random weights, tensor 'embed.weight'.*multiples of 256"):
        random_checkpoint(CONFIG, 1, "Q4_K")
    with pytest.raises(UnsupportedError, match="Q9"):
        random_checkpoint(CONFIG, 1, "Q9")
    assert parse("random:12") == (12, "BF16")
    assert parse("random:12:Q4_K") == (12, "Q4_K")
    assert parse(f"random:{2**64 - 1}") == (2**64 - 1, "BF16")
    for bad in ("random:", "random:1:", "x:1", "random:-1", "random:1.5", "random:x", "7", f"random:{2**64}"):
        with pytest.raises(ConfigError, match="random:SEED"):
            parse(bad)


def test_a_preset_is_a_configuration_too() -> None:
    checkpoint = preset_checkpoint("preset:mpt-125m", "random:5:Q4_0")
    assert checkpoint.config["positions"] == "learned"
    assert checkpoint.tensors["positions.weight"].shape == (2048, 768)
    assert (checkpoint.dequantize("layers.11.mlp_norm.weight") == 1).all()
    assert 0 < np.abs(checkpoint.dequantize("layers.11.mlp_norm.bias")).max() < 0.04
    assert checkpoint.tensors["layers.0.attn.qkv.weight"].format == "Q4_0"
    with pytest.raises(ConfigError, match=r"shape without weights: say weights='random:SEED'"):
        preset_checkpoint("preset:mpt-125m", None)
    with pytest.raises(ConfigError, match=r"did you mean 'mpt-125m'"):
        preset_checkpoint("preset:mpt-126m", "random:1")


@pytest.mark.parametrize("form", ["BF16", "Q4_0"])
def test_pooled_weights_have_the_scale_of_random_ones_and_repeat(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "POOL", 64 * 100)
    config = preset("smollm2-135m") | {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96}
    pooled, plain = random_weights.pooled_checkpoint(config, 3, form), random_weights.random_checkpoint(config, 3, form)
    assert pooled.tensors == plain.tensors
    for name, info in plain.tensors.items():
        assert pooled.read(name).shape == (info.nbytes,)
        values = pooled.dequantize(name)
        if len(info.shape) == 2:
            assert values.std() == pytest.approx(info.shape[1] ** -0.5, rel=0.1)
    embed = pooled.dequantize("embed.weight")
    assert np.array_equal(embed[:100], embed[100:200])
    assert not np.array_equal(embed[0], embed[1])
    assert np.array_equal(pooled.read("final_norm.weight"), plain.read("final_norm.weight"))


def test_values_fill_their_interval_evenly() -> None:
    values = random_values("layers.0.attn.q.bias", (10_001,), 1)  # an odd number of them
    assert values.shape == (10_001,)
    assert values.dtype == np.float32
    limit = 0.02 * math.sqrt(3)
    assert -limit <= values.min() < -0.999 * limit
    assert 0.999 * limit < values.max() < limit
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert np.array_equal(values[:3], random_values("layers.0.attn.q.bias", (3,), 1))


def test_a_pool_has_a_row_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool, rows in ((1, 1), (127, 1), (128, 2), (192, 3)):
        monkeypatch.setattr(random_weights, "POOL", pool)
        embed = random_weights.pooled_checkpoint(CONFIG, 3, "F32").dequantize("embed.weight")
        assert len(np.unique(embed, axis=0)) == rows
