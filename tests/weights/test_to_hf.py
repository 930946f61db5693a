"""Configurations and weights as Hugging Face has them, there and back."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.models import presets
from roofline.models.registry import config_of
from roofline.weights import names
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.hf import from_hf
from roofline.weights.files.safetensors import INDEX, SafetensorsFile
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
    "gemma with a window in every layer": {
        **{key: value for key, value in presets.preset("gemma-2-2b").items() if key != "layer_windows"},
        "sliding_window": 4096,
    },
    "mpt with its own width of the MLP": presets.preset("mpt-125m") | {"ffn": 2000},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_read_back_as_it_was(name: str) -> None:
    config = {"positions": "rope", "bias": False} | CONFIGS[name]
    read = {"positions": "rope", "bias": False} | from_hf(Path("config.json"), hf_config(config))
    read["rope_scaling"] = read["rope_scaling"] and {**config["rope_scaling"], **read["rope_scaling"]}
    assert config_of(read) == config_of(config)  # what is left out is as the family has it


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


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.3.block_sparse_moe.experts.11.w2.weight"),
        ("qwen_moe", "model.layers.3.mlp.experts.11.down_proj.weight"),
    ],
)
def test_names_of_single_experts_keep_their_numbers(family: str, name: str) -> None:
    assert names.from_hf(family, name) == "layers.3.mlp.experts.11.down.weight"
    assert names.to_hf(family, "layers.3.mlp.experts.11.down.weight") == name
    with pytest.raises(ConfigError, match="has no name in GGUF files"):
        names.to_gguf(family, "layers.3.mlp.experts.11.down.weight")


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
            assert names.from_hf(config["family"], names.to_hf(config["family"], ours)) == ours
    with pytest.raises(ConfigError, match=r"attn\.qkv"):
        names.to_hf("llama", "layers.0.attn.qkv.weight")


def test_files_are_filled_to_their_limit_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = presets.preset("smollm2-135m") | SMALL["llama"] | {"max_position": 128}
    shapes = names.parameter_shapes(config)
    rows = [(name, shape, bytes(4 * math.prod(shape))) for name, shape in shapes.items()]
    first, second = len(rows[0][2]), len(rows[1][2])
    total = sum(len(raw) for _, _, raw in rows)
    for limit, in_first in ((first + second, 2), (first + second - 1, 1), (1, 1), (total, len(rows))):
        monkeypatch.setattr("roofline.weights.to_hf.FILE_BYTES", limit)
        folder = tmp_path / "made" / f"out{limit}"
        write_folder(folder, config, rows, "F32")
        files = sorted(folder.glob("*.safetensors"))
        assert len(SafetensorsFile(files[0]).tensors) == in_first
        assert folder.stat().st_mode & 0o777 == 0o755
        for file in files:
            assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0  # the data is aligned
        if len(files) == 1:
            assert files[0].name == "model.safetensors"
            continue
        index = json.loads((folder / INDEX).read_text())
        assert '\n "weight_map": {\n  "' in (folder / INDEX).read_text()  # for people too
        assert '\n "model_type": "llama",\n' in (folder / "config.json").read_text()
        assert index["metadata"]["total_size"] == total
        assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
        assert {*index["weight_map"].values()} == {file.name for file in files}
        open_checkpoint(folder)


def test_what_others_need_to_know_is_in_the_configuration() -> None:
    llama = presets.preset("llama-3-8b")
    for dtype, said in (("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")):
        assert hf_config(llama, dtype)["torch_dtype"] == said
    written = hf_config(llama)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert (written["attention_bias"], written["mlp_bias"], written["hidden_act"]) == (False, False, "silu")
    assert written["rope_parameters"] == {
        "rope_theta": llama["rope_theta"],
        **(llama["rope_scaling"] or {"rope_type": "default"}),
    }
    for name, config in CONFIGS.items():
        if "local_theta" in config and config["rope_scaling"]:  # which has a table for each kind of layer
            whole = hf_config(config)["rope_parameters"]["full_attention"]
            assert whole == {"rope_theta": config["rope_theta"], **config["rope_scaling"]}, name
        elif config["family"] != "mpt":
            beside = {"llama_4_scaling_beta": config["query_beta"]} if config["family"] == "ministral3" else {}
            scaling = config["rope_scaling"] and {**config["rope_scaling"], **beside}
            assert hf_config(config).get("rope_scaling") == scaling, name
    assert "attention_bias" not in hf_config(CONFIGS["qwen2"])
    assert [hf_config(CONFIGS[name])["model_type"] for name in ("mistral", "qwen2", "qwen3")] == [
        "mistral",
        "qwen2",
        "qwen3",
    ]
    with pytest.raises(ConfigError, match="a falcon model has no config"):
        hf_config(llama | {"family": "falcon"})
    mpt = hf_config(presets.preset("mpt-125m"))
    assert mpt["attn_config"] == {"alibi": False, "alibi_bias_max": 8}
    assert (mpt["expansion_ratio"], type(mpt["expansion_ratio"])) == (4, int)
    assert hf_config(CONFIGS["mpt with its own width of the MLP"])["expansion_ratio"] == 2000 / 768
    interleaved = presets.preset("mpt-125m") | {"positions": "rope", "rope_style": "interleaved"}
    with pytest.raises(ConfigError, match="rope_style 'interleaved'"):
        hf_config(interleaved)


def test_the_original_context_is_written_as_an_integer() -> None:
    """As in published files: llama.cpp's converter takes no other, and transformers warns of one."""
    original = "original_max_position_embeddings"
    scaling = {"rope_type": "yarn", "factor": 4.0, original: 4096.0}
    written: dict[str, Any] = hf_config(presets.preset("llama-2-7b") | {"rope_scaling": scaling})
    for key in ("rope_scaling", "rope_parameters"):
        value = written[key][original]
        assert isinstance(value, int)
        assert value == 4096
