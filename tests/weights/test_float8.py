"""Checkpoints of 8-bit floats: every way to lay scales out, and what is refused."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.quantised.methods import check_config

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch", reason="it writes the files")
WIDTH, FFN, VOCAB, LAYERS = 256, 384, 60, 2
CONFIG = {
    "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 1, "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (64, WIDTH), "self_attn.v_proj": (64, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": given, "input_activations": None}},
    }  # fmt: skip


# kind -> (quantization_config, what the scale's name ends with, its shape for a matrix)
KINDS: dict[str, tuple[Any, str, Any]] = {
    "fp8 blocks": (FP8, "_scale_inv", lambda rows, columns: (-(-rows // 128), columns // 128)),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", lambda rows, columns: ()),
    "tensor": (compressed("tensor"), "_scale", lambda rows, columns: (1,)),
    "channel": (compressed("channel"), "_scale", lambda rows, columns: (rows, 1)),
    "block": (
        compressed("block", block_structure=[128, 128]),
        "_scale",
        lambda rows, columns: (-(-rows // 128), columns // 128),
    ),
}


def tensors_of(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors of a file, float32 values by Hugging Face's name)."""
    _, ending, shape_of = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    stored = {"model.embed_tokens.weight": torch.randn(VOCAB, WIDTH, generator=generator).bfloat16()}
    stored["model.norm.weight"] = torch.ones(WIDTH)
    values = {}
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            stored[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH)
        for part, (rows, columns) in SHAPES.items():
            name = f"model.layers.{layer}.{part}.weight"
            codes = (100 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)
            scale = torch.rand(shape_of(rows, columns), generator=generator) + 0.5
            scale = scale.bfloat16() if kind == "channel" else scale
            stored[name], stored[name + ending] = codes, scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
            wide = scale.float()
            if "block" in kind:
                wide = wide.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
            values[name] = codes.float() * wide
        stored[f"model.layers.{layer}.self_attn.k_scale"] = torch.ones(1)
    return stored, values


def written(folder: Path, kind: str, **changes: Any) -> Path:
    """A model's folder; changes: tensors by name, None to leave one out."""
    stored = tensors_of(kind)[0] | changes
    library.save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors"
    )
    config = {**CONFIG, "quantization_config": KINDS[kind][0]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_codes_times_scales(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, kind))
    _, values = tensors_of(kind)
    for ours, theirs in (("attn.q", "self_attn.q_proj"), ("attn.k", "self_attn.k_proj"), ("mlp.down", "mlp.down_proj")):
        info = checkpoint.tensors[f"layers.1.{ours}.weight"]
        assert (info.format, info.nbytes) == ("E4M3", info.shape[0] * info.shape[1] // 128 * 132)
        assert checkpoint.read(info.name).size == info.nbytes
        want = values[f"model.layers.1.{theirs}.weight"].numpy()
        assert np.array_equal(checkpoint.dequantize(info.name), want)
    assert checkpoint.tensors["embed.weight"].format == "BF16"
    assert not any("scale" in name for name in checkpoint.tensors)


def test_rows_that_are_no_multiple_of_128_keep_their_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The widths of SmolLM2-135M are 576 and 1536, with blocks of 128 x 128 that are cut off at the ends."""
    width, ffn = 576, 1536
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_attention_heads": 9, "num_key_value_heads": 3}
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (192, width), "self_attn.v_proj": (192, width)}
    shapes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width)}
    shapes["mlp.down_proj"] = (width, ffn)
    stored = {"model.embed_tokens.weight": torch.randn(VOCAB, width, generator=generator).bfloat16()}
    stored |= {f"model.{name}.weight": torch.ones(width) for name in ("norm", "layers.0.input_layernorm")}
    stored["model.layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    wanted = {}
    for part, (rows, columns) in shapes.items():
        name = f"model.layers.0.{part}.weight"
        codes = (100 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        stored |= {name: codes, f"{name}_scale_inv": scale}
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        wanted[part] = (codes.float() * spread).numpy()
    library.save_file(stored, tmp_path / "model.safetensors")
    config = {**CONFIG, **sizes, "num_hidden_layers": 1, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    for ours, theirs in (("attn.q", "self_attn.q_proj"), ("attn.k", "self_attn.k_proj"), ("mlp.down", "mlp.down_proj")):
        name = f"layers.0.{ours}.weight"
        assert checkpoint.tensors[name].format == ("E4M3" if ours == "mlp.down" else "F32")
        assert np.array_equal(checkpoint.dequantize(name), wanted[theirs])
    assert "6 of 8 matrices are kept in float32" in caplog.text
    assert "no multiple of 128" in caplog.text


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({Q + "_scale_inv": None}, ConfigError, "0 tensors hold its scale"),
        ({Q + "_scale": torch.ones(1)}, ConfigError, "2 tensors hold its scale"),
        ({Q + "_scale_inv": torch.ones(2, 3)}, ConfigError, r"F32 of \(2, 3\) for \(256, 256\)"),
        ({Q + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, ConfigError, "I32 of"),
        ({Q: torch.ones(256, 256).bfloat16()}, ConfigError, "q_proj.weight_scale_inv'.*no model"),
        ({Q: torch.ones(256, 200).to(torch.float8_e4m3fn)}, ConfigError, r"has shape \(256, 200\), not \(256, 256\)"),
        ({Q: torch.ones(256).to(torch.float8_e4m3fn)}, UnsupportedError, "matrices are read so"),
        ({Q: torch.ones(256, 256).to(torch.float8_e5m2), Q + "_scale_inv": None}, UnsupportedError, "F8_E5M2"),
        ({"model.layers.0.other_scale": torch.ones(1)}, ConfigError, "other_scale'.*no model"),
    ],
)
def test_files_that_are_not_whole_are_refused(changes: dict[str, Any], kind: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        open_checkpoint(written(tmp_path, "fp8 blocks", **changes))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "hqq"}, "quant_method hqq"),
        ({**FP8, "weight_block_size": [64, 64]}, "64, 64"),
        ({**FP8, "fmt": "e5m2"}, "e5m2"),
        ({**compressed("tensor"), "format": "pack-quantized"}, "pack-quantized"),
        (compressed("tensor", num_bits=4), "floats of 4 bits"),
        (compressed("tensor", type="int"), "weights of type int are read in int-quantized"),
        (compressed("group", group_size=32), "group"),
        (compressed("block", block_structure=[64, 64]), "64, 64"),
        ("fp8", "no table"),
    ],
)
def test_other_quantisations_are_refused(quantization: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_config(Path("config.json"), quantization)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 300)
    | st.sampled_from(["fp8", "compressed-tensors", "float", "tensor"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "g", "type"]), inner),
    max_leaves=6,
)
KEYS = ("quant_method", "weight_block_size", "fmt", "format", "config_groups")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), json_values | st.sampled_from([FP8, "float-quantized"])) | json_values)
def test_any_json_is_read_or_refused(quantization: Any) -> None:
    with contextlib.suppress(UnsupportedError):
        check_config(Path("config.json"), quantization)
        assert quantization["quant_method"] in ("fp8", "compressed-tensors")


def in_float8(folder: Path, pattern: str, quantization: dict[str, Any]) -> dict[str, np.ndarray]:
    """Write a folder's matrices of that pattern in e4m3, with a scale for each block or for each of them; the float32
    values by Hugging Face's name."""
    stored, values = library.load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if re.fullmatch(pattern, name)]:
        rows, columns = stored[name].shape
        blocks = quantization["weight_block_size"] is not None
        scale = torch.full((rows // 128, columns // 128) if blocks else (), 0.25) * (1 + 0.5 * len(values))
        codes = (stored[name].float() / scale.flatten()[0]).to(torch.float8_e4m3fn)
        values[name] = codes.float().numpy() * scale.flatten()[0].numpy()
        stored |= {name: codes, f"{name}_scale_inv": scale.to(torch.float32)}
        if not blocks:
            stored[name.removesuffix("weight") + "activation_scale"] = torch.ones(())
    library.save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_blocks_of_experts_are_read_under_published_names(tmp_path: Path) -> None:
    """As MiniMax-M2 is published: all matrices of layers but the router, and torch's name of the numbers."""
    from tests.models.parity_cases import CASES, theirs

    sizes = {"width": 128, "heads": 2, "kv_heads": 2, "head_dim": 128, "rotary_dim": 64, "ffn": 128, "experts": 2}
    theirs({**CASES["minimax_m2"].config, **sizes, "layers": 1}).save_pretrained(tmp_path)
    settings = {**FP8, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    values = in_float8(tmp_path, r"model\.layers\..*(_proj|\.w[123])\.weight", settings)
    checkpoint = open_checkpoint(tmp_path)
    assert len(values) == 4 + 2 * 3
    for name, ours in (("self_attn.k_proj", "attn.k"), ("block_sparse_moe.experts.1.w2", "mlp.experts.1.down")):
        tensor = f"layers.0.{ours}.weight"
        assert checkpoint.tensors[tensor].format == "E4M3"
        assert np.array_equal(checkpoint.dequantize(tensor), values[f"model.layers.0.{name}.weight"])
    assert checkpoint.tensors["layers.0.mlp.choice.bias"].shape == (2,)


def test_a_scale_for_each_matrix_of_the_text_part_of_a_wrapper_is_read(tmp_path: Path) -> None:
    """As Ministral 3 is published: beside a vision tower that is not quantised, with scales of activations."""
    from tests.models.wrapped_models import wrapped

    text = {"model_type": "ministral3", "hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    wrapped("mistral3", text=text).save_pretrained(tmp_path)
    settings = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
    settings["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    values = in_float8(tmp_path, r"(.*\.)?language_model\..*layers\..*_proj\.weight", settings)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["family"] == "ministral3"
    assert len(values) == 2 * 7
    (name,) = (name for name in values if name.endswith("layers.1.mlp.down_proj.weight"))
    assert checkpoint.tensors["layers.1.mlp.down.weight"].format == "E4M3"
    assert np.array_equal(checkpoint.dequantize("layers.1.mlp.down.weight"), values[name])
