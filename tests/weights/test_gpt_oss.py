"""Files of gpt-oss: what its config.json says, its experts in joined tensors and in MXFP4, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.models import presets
from roofline.models.registry import configure
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.config.hf import from_hf
from roofline.weights.quantised.methods import check_config

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="it writes the files")

# As published with gpt-oss-20b.
PUBLISHED: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 64},
    **{"experts_per_token": 4, "eos_token_id": 200002, "hidden_act": "silu", "hidden_size": 2880},
    **{"initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880},
    **{"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072},
    **{"model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24},
    **{"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999},
    **{"rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128},
    **{"swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088},
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}
SMALL = PUBLISHED | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": None}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "num_local_experts": 3}
SMALL |= {"num_experts_per_tok": 2, "experts_per_token": 2}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_the_published_configuration_is_the_preset() -> None:
    ours = configure(from_hf(Path("config.json"), PUBLISHED))[1]
    assert ours == configure(presets.preset("gpt-oss-20b"))[1]
    assert ours.rope is not None
    assert dict(ours.rope.scaling)["truncate"] == 0.0


def test_what_transformers_takes_where_nothing_is_said() -> None:
    bare = {key: value for key, value in PUBLISHED.items() if not key.startswith(("rope_", "layer_", "sliding_"))}
    assert configure(from_hf(Path("config.json"), bare))[1] == configure(presets.preset("gpt-oss-20b"))[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"experts_per_token": 5}, "experts_per_token = 5"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok"),
    ],
)
def test_what_the_family_does_not_have_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RooflineError, match=message):
        from_hf(Path("config.json"), PUBLISHED | changed)


def test_keys_of_a_method_are_honoured_or_refused() -> None:
    with pytest.raises(UnsupportedError, match="group_size"):
        check_config(Path("config.json"), {"quant_method": "mxfp4", "group_size": 16})


def written(folder: Path, change: dict[str, Any] | None = None) -> Path:
    """A model of one layer with experts in MXFP4, some of its tensors changed."""
    stored = _stored()[0] | (change or {})
    (folder / "config.json").write_text(json.dumps(SMALL))
    safetensors.save_file(stored, folder / "model.safetensors")
    return folder


def _stored() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The tensors of the file, and the values that those of experts stand for, by our names."""
    random = np.random.default_rng(4)
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    tensors = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64), "model.norm.weight": (64,)}
    layer, experts = "model.layers.0", "model.layers.0.mlp.experts"
    tensors |= {f"{layer}.{n}_layernorm.weight": (64,) for n in ("input", "post_attention")}
    tensors |= {f"{layer}.self_attn.{n}.weight": size for n, size in sizes.items()}
    tensors |= {f"{layer}.self_attn.{n}.bias": size[:1] for n, size in sizes.items()}
    tensors |= {f"{layer}.self_attn.sinks": (4,)}
    tensors |= {f"{layer}.mlp.router.weight": (3, 64), f"{layer}.mlp.router.bias": (3,)}
    tensors |= {f"{experts}.gate_up_proj_bias": (3, 64), f"{experts}.down_proj_bias": (3, 64)}
    floats = {name: random.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}
    stored = {name: torch.from_numpy(each).bfloat16() for name, each in floats.items()}
    values = {}
    for part, rows, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        blocks = random.integers(0, 256, (3, rows, inputs // 32, 16), np.uint8)
        scales = random.integers(120, 130, (3, rows, inputs // 32), np.uint8)
        bytes_of = {f"{experts}.{part}_blocks": blocks, f"{experts}.{part}_scales": scales}
        stored |= {name: torch.from_numpy(each) for name, each in bytes_of.items()}
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(3, rows, inputs // 32, 32)
        wide = (E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(3, rows, inputs)
        for number in range(3):
            if part == "down_proj":
                values[f"layers.0.mlp.experts.{number}.down.weight"] = wide[number]
            else:
                values[f"layers.0.mlp.experts.{number}.gate.weight"] = wide[number, 0::2]
                values[f"layers.0.mlp.experts.{number}.up.weight"] = wide[number, 1::2]
    both = stored[f"{experts}.gate_up_proj_bias"].float().numpy()
    values |= {"layers.0.mlp.experts.gate.bias": both[:, 0::2].reshape(-1)}
    values |= {"layers.0.mlp.experts.up.bias": both[:, 1::2].reshape(-1)}
    values |= {"layers.0.attn.sinks.weight": stored[f"{layer}.self_attn.sinks"].float().numpy()}
    return stored, values


def test_values_of_mxfp4_are_the_files_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path))
    for name, want in _stored()[1].items():
        assert checkpoint.read(name).size == checkpoint.tensors[name].nbytes
        assert (checkpoint.dequantize(name) + np.float32(0)).tobytes() == (want + np.float32(0)).tobytes(), name
    assert checkpoint.tensors["layers.0.mlp.experts.2.up.weight"].format == "MXFP4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": np.full((3, 64, 1), 255, np.uint8)}, "holds NaN"),
        ({"down_proj_scales": np.zeros((3, 64, 2), np.uint8)}, r"down_proj_scales.*\(3, 64, 2\)"),
        ({"down_proj_blocks": np.zeros((3, 64, 1, 8), np.uint8)}, "groups of 32 inputs, 16 bytes"),
        ({"gate_up_proj_bias": np.zeros((3, 63), np.float32)}, "does not hold all experts"),
        ({"gate_up_proj": np.zeros((3, 64), np.float32)}, "does not hold all experts"),
    ],
)
def test_damaged_experts_are_refused_by_name(change: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    named = {f"model.layers.0.mlp.experts.{name}": torch.from_numpy(each) for name, each in change.items()}
    folder = written(tmp_path, named)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder).read("layers.0.mlp.experts.1.down.weight")
