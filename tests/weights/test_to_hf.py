"""Configurations and weights as Hugging Face has them, there and back."""

from pathlib import Path

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.models import presets
from roofline.weights import names
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.hf import from_hf
from roofline.weights.random_weights import random_values
from roofline.weights.to_hf import hf_config, write_folder

SMALL = {
    "llama": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 96},
    "mpt": {"width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 256, "vocab": 96},
}
QWEN = presets.preset("llama-3-8b") | {"family": "qwen", "norm_eps": 1e-6}
CONFIGS = {name: presets.preset(name) for name in presets.names()} | {
    "mistral": presets.preset("llama-2-7b") | {"sliding_window": 4096},
    "qwen2": QWEN | {"attention_bias": True},
    "qwen3": QWEN | {"qk_norm": True},
    "mpt with its own width of the MLP": presets.preset("mpt-125m") | {"ffn": 2000},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_back_as_it_was(name: str) -> None:
    config = {"positions": "rope", "bias": False} | CONFIGS[name]
    read = {"positions": "rope", "bias": False} | from_hf(Path("config.json"), hf_config(config))
    read["rope_scaling"] = read["rope_scaling"] and {**config["rope_scaling"], **read["rope_scaling"]}
    assert read == config


@pytest.mark.parametrize("kind", ["llama", "mpt"])
@pytest.mark.parametrize("several", [False, True])
def test_weights_are_read_back_as_they_were(kind: str, several: bool, tmp_path: Path, monkeypatch) -> None:
    if several:
        monkeypatch.setattr("roofline.weights.to_hf.FILE_BYTES", 40_000)
    preset = "mpt-125m" if kind == "mpt" else "smollm2-135m"
    config = presets.preset(preset) | SMALL[kind] | {"max_position": 128}
    tensors = {name: random_values(name, shape, 1) for name, shape in names.parameter_shapes(config).items()}
    rows = [(name, values.shape, values.view(np.uint8).reshape(-1)) for name, values in tensors.items()]
    write_folder(tmp_path / "out", config, rows, "F32", {"note.txt": b"beside"})
    found = open_checkpoint(tmp_path / "out")
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == several
    for name, values in tensors.items():
        assert np.array_equal(found.dequantize(name), values), name
    assert (tmp_path / "out" / "note.txt").read_bytes() == b"beside"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="is there already"):
        write_folder(tmp_path / "out", config, rows, "F32")


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    config = presets.preset("smollm2-135m") | SMALL["llama"]

    def tensors():
        yield "embed.weight", (96, 64), bytes(96 * 64 * 4)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "out", config, tensors(), "F32")
    assert not list(tmp_path.iterdir())


def test_every_name_goes_there_and_back() -> None:
    for name in ("mpt-125m", "mpt-7b-alibi", "llama-3-8b"):
        config = presets.preset(name) | {"layers": 2}
        for ours in names.parameter_shapes(config):
            assert names.from_hf(names.to_hf(config["family"], ours)) == ours
    with pytest.raises(ConfigError, match=r"attn\.qkv"):
        names.to_hf("llama", "layers.0.attn.qkv.weight")
