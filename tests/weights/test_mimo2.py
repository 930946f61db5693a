"""Files of MiMo-V2-Flash: what transformers takes from published keys, and what it takes for granted."""

import copy
from pathlib import Path
from typing import Any

import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.config import KvShape
from roofline.models.registry import configure
from roofline.weights.config.hf import from_hf
from roofline.weights.families.mimo2 import NAMES, to_gguf
from tests.models.parity_cases import CASES

HF: dict[str, Any] = {
    **{"model_type": "mimo_v2_flash", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"vocab_size": 50, "intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16},
    **{"max_position_embeddings": 512, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
# As published files say what transformers takes for granted.
PUBLISHED: dict[str, Any] = {
    **{"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "swa_num_key_value_heads": 2},
    **{"swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "swa_rope_theta": 10_000},
    **{"rope_theta": 5_000_000, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "n_shared_experts": None},
    **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "topk_method": "noaux_tc"},
    **{"attention_chunk_size": 128, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128},
    **{"routed_scaling_factor": None, "attention_projection_layout": "split"},
}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
}


def read(changes: dict[str, Any]) -> dict[str, Any]:
    return from_hf(Path("config.json"), copy.deepcopy(HF | changes))


@pytest.mark.parametrize("changes", [{}, PUBLISHED, {"rope_parameters": ROPES}, {"sliding_window": 9}, {
    "sliding_window_size": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}, {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None, "n_group": 2}])  # fmt: skip
def test_a_config_is_read_as_transformers_reads_it(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="its classes say what is expected")
    _, cfg = configure(read(changes))
    theirs = transformers.MiMoV2FlashConfig(**copy.deepcopy(HF | changes))
    slides = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [cfg.window(layer) for layer in range(3)] == [theirs.sliding_window if each else 0 for each in slides]
    assert [cfg.kv_shape(layer) for layer in range(3)] == [KvShape(2 if each else 1, 24) for each in slides]
    for layer, kind in enumerate(theirs.layer_types):
        table, rope = theirs.rope_parameters[kind], cfg.rope_of(layer)
        assert rope is not None
        assert (rope.theta, rope.dim) == (table["rope_theta"], int(24 * table["partial_rotary_factor"]))
    assert [layer in cfg.dense for layer in range(3)] == [kind == "dense" for kind in theirs.mlp_layer_types]
    scale = theirs.attention_value_scale
    assert (cfg.value_scale, cfg.routed_scale) == (1.0 if scale is None else scale, theirs.routed_scaling_factor)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"hybrid_layer_pattern": [0, 1, 0]}, UnsupportedError, "hybrid_layer_pattern"),
        ({"swa_num_key_value_heads": 1}, UnsupportedError, "swa_num_key_value_heads"),
        ({"swa_rope_theta": 5e4}, UnsupportedError, "swa_rope_theta"),
        ({"rope_theta": 1e4}, UnsupportedError, "rope_theta"),
        ({"moe_layer_freq": [1, 1, 1]}, UnsupportedError, "moe_layer_freq"),
        ({"add_full_attention_sink_bias": True}, UnsupportedError, "add_full_attention_sink_bias"),
        ({"n_shared_experts": 1}, UnsupportedError, "n_shared_experts"),
        ({"sliding_window": 0}, ConfigError, "sliding_window"),
        ({"v_head_dim": 32}, ConfigError, "value_dim"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, ConfigError, "rope_theta"),
        (
            {"rope_parameters": ROPES | {"sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2}}},
            UnsupportedError,
            "rope_parameters.sliding_attention",
        ),
    ],
)
def test_what_transformers_would_not_compute_is_refused(change: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        configure(read(change))


def test_modules_that_guess_further_tokens_are_not_read() -> None:
    assert not NAMES.reads_hf("model.mtp.layers.0.self_attn.q_proj.weight")
    assert NAMES.reads_hf("model.layers.0.self_attn.q_proj.weight")


def test_a_gguf_file_says_no_factor_of_experts_and_no_layers_alike() -> None:
    config = dict(CASES["mimo_v2_flash"].config)
    assert to_gguf(config).architecture == "mimo2"
    with pytest.raises(UnsupportedError, match="weights of experts that are scaled"):
        to_gguf(config | {"routed_scale": 2.5})
    with pytest.raises(UnsupportedError, match="no window"):
        to_gguf(config | {"layer_windows": [], "sliding_window": None})
