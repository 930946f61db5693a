"""Families that choose experts by scores: every spelling of their files beside transformers' classes, and names."""

import copy
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="its classes say what is expected")

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError  # noqa: E402
from roofline.models.registry import config_of  # noqa: E402
from roofline.ops.rope_tables import frequencies  # noqa: E402
from roofline.weights.config.gguf import from_gguf  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.config.unread_keys import unread_keys  # noqa: E402

FIELDS: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 50, "intermediate_size": 96, "max_position_embeddings": 512},
}
BESIDE: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0}
# What any file may say, and what each type's may.
ANY: list[dict[str, Any]] = [
    {},
    *({key: None} for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "head_dim")),
    {"head_dim": 32},
    {"head_dim": 16},
    {"tie_word_embeddings": True},
    {"attention_bias": True},
    {"rope_theta": 3e4},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    {"rope_scaling": LINEAR, "rope_theta": 3e4},
    {"rope_scaling": YARN},
    {"partial_rotary_factor": 0.5},
    {"num_experts": 6},
    {"num_local_experts": 6},
    {"norm_topk_prob": True},
    {"norm_topk_prob": False},
    {"n_group": 2, "topk_group": 1},
    {"routed_scaling_factor": 1.5},
]
OF_KIND: dict[str, list[dict[str, Any]]] = {
    "glm4_moe": [
        *({"first_k_dense_replace": count} for count in (0, 2, 4)),
        {"partial_rotary_factor": None},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {"rope_scaling": {**YARN, "partial_rotary_factor": 1.0}},
        {"use_qk_norm": True, "n_shared_experts": 2},
        {"hidden_size": 82},
    ],
    "solar_open": [{"n_shared_experts": 2}, {"rope_scaling": {**YARN, "rope_theta": 5e4}}],
    "dots1": [
        {"sliding_window": 8, "max_window_layers": 2},
        {"max_window_layers": 1},
        {"sliding_window": None, "max_window_layers": 1},
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9},
        {"first_k_dense_replace": 2},
        {"first_k_dense_replace": None},
    ],
    "olmoe": [{"clip_qkv": 8.0}],
    "minimax_m2": [
        {"rotary_dim": 64, "head_dim": 128},
        {"rotary_dim": 64, "head_dim": 128, "partial_rotary_factor": 0.25},
        {"rotary_dim": 64, "head_dim": 128, "partial_rotary_factor": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ],
    "ernie4_5_moe": [
        {"moe_k": 3, "moe_num_experts": 5},
        {"moe_layer_start_index": 2},
        {"moe_layer_end_index": 2, "moe_layer_interval": 2},
        {"moe_layer_start_index": 0, "moe_layer_interval": 3},
        {"moe_num_shared_experts": 0},
    ],
    "exaone_moe": [
        {"sliding_window": 8, "sliding_window_pattern": 2},
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"sliding_window": 8, "layer_types": ["full_attention"] * 4},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        {"sliding_window_pattern": "LLLG"},
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        {"first_k_dense_replace": 2, "num_shared_experts": 2},
    ],
    "sarvam_moe": [
        {"num_experts": 6, "num_shared_experts": 2, "first_k_dense_replace": 2},
        {"partial_rotary_factor": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ],
    "flex_olmo": [{"num_experts": None}],
    "hunyuan_v1_moe": [
        {"moe_topk": [3, 3, 3, 3], "num_experts": 6},
        {"moe_topk": [3, 2, 3, 3], "num_experts": 6},
        {"moe_topk": 3, "num_experts": 6, "moe_intermediate_size": [96] * 4, "num_shared_expert": [1] * 4},
        {"head_dim": 16, "num_experts": 6, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ],
    "hy_v3": [
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        {"router_scaling_factor": 1.0, "num_shared_experts": 2},
    ],
}


def ours(kind: str, changes: dict[str, Any]) -> Any:
    """Our configuration; None where we refuse it."""
    try:
        return config_of(from_hf(Path("config.json"), {**FIELDS, "model_type": kind, **copy.deepcopy(changes)}))
    except RooflineError:
        return None


def theirs(kind: str, changes: dict[str, Any]) -> Any:
    """Transformers' configuration and rotary table; None where it refuses it."""
    kind_class = transformers.CONFIG_MAPPING[kind]
    module_name = "glm4_moe" if kind == "sarvam_moe" else kind
    module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    rotary = next(value for name, value in vars(module).items() if name.endswith("RotaryEmbedding"))
    try:
        config = kind_class(**copy.deepcopy({**FIELDS, **changes}))
        return config, rotary(config)
    except Exception:  # of whatever type
        return None


def sparse_layers(kind: str, config: Any) -> list[bool]:
    """Of each layer whether it has experts, as the types' decoder layers ask."""
    layers = range(config.num_hidden_layers)
    if kind == "ernie4_5_moe":
        first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
        return [(layer + 1) % step == 0 and first <= layer <= last for layer in layers]
    if getattr(config, "mlp_layer_types", None) is not None:
        return [each == "sparse" for each in config.mlp_layer_types]
    return [layer >= (getattr(config, "first_k_dense_replace", 0) or 0) for layer in layers]


@pytest.mark.parametrize("kind", OF_KIND)
def test_every_spelling_is_read_as_transformers_reads_it_or_refused(kind: str) -> None:
    import torch

    honoured = 0
    for changes in ANY + OF_KIND[kind]:
        changes = BESIDE.get(kind, {"num_experts_per_tok": 2}) | changes
        mine, both = ours(kind, changes), theirs(kind, changes)
        if mine is None or both is None:
            continue
        config, rotary = both
        renormalise = (
            kind not in ("olmoe", "flex_olmo") if not hasattr(config, "norm_topk_prob") else bool(config.norm_topk_prob)
        )
        chosen = config.num_experts_per_tok
        chosen = chosen[0] if isinstance(chosen, list) else chosen
        names = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
        expected = (
            *(config.num_key_value_heads, config.rms_norm_eps, config.tie_word_embeddings, renormalise),
            *(next(getattr(config, name) for name in names if hasattr(config, name)), chosen),
            getattr(config, "routed_scaling_factor", getattr(config, "router_scaling_factor", 1.0)),
        )
        read = (mine.kv_heads, mine.norm_eps, mine.tied, mine.renormalise, mine.experts, mine.experts_per_token)
        assert (*read, mine.routed_scale) == expected, changes
        assert [layer not in mine.dense for layer in range(4)] == sparse_layers(kind, config), changes
        groups = getattr(config, "n_group", 1) or 1, getattr(config, "topk_group", 1) or 1
        assert (mine.groups, mine.kept_groups) == groups, changes
        shared = next((getattr(config, name) for name in vars(config) if name.endswith("shared_experts")), 0)
        shared = 1 if kind == "hunyuan_v1_moe" else shared
        assert mine.shared_ffn == shared * mine.ffn, changes
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * 4
        assert [mine.window(layer) > 0 for layer in range(4)] == [each == "sliding_attention" for each in kinds]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert mine.head_dim == dim, changes
        turned, factor = frequencies(mine.rope)
        np.testing.assert_allclose(turned, rotary.inv_freq.to(torch.float64).numpy(), rtol=1e-5, err_msg=str(changes))
        assert factor == pytest.approx(rotary.attention_scaling)
        honoured += 1
    assert honoured >= 12


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("glm4_moe", {"n_group": 3}, ConfigError, "n_group: .* does not divide"),
        ("glm4_moe", {"first_k_dense_replace": 5}, ConfigError, "first_k_dense_replace"),
        (
            "glm4_moe",
            {"num_local_experts": 4, "n_routed_experts": 8},
            ConfigError,
            "num_local_experts: .* another name",
        ),
        ("solar_open", {"first_k_dense_replace": 1}, UnsupportedError, "first_k_dense_replace = 1"),
        ("solar_open", {"use_qk_norm": True}, UnsupportedError, "use_qk_norm = True"),
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedError, "clip_qkv"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, UnsupportedError, "attn_type_list"),
        ("minimax_m2", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func = softmax"),
        ("ernie4_5_moe", {"use_bias": True}, UnsupportedError, "use_bias = True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, UnsupportedError, "moe_norm_min"),
        ("exaone_moe", {"sliding_window": None}, ConfigError, "sliding_window: is null"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "hash_moe", "dense", "dense"]}, UnsupportedError, "hash_moe"),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2, 1]}, UnsupportedError, "moe_topk that differs"),
        ("hunyuan_v1_moe", {"num_experts": 4, "use_cla": True}, UnsupportedError, "use_cla = True"),
        ("exaone_moe", {"is_moe_layer": [True, True, True, False]}, ConfigError, "is_moe_layer: is not what"),
        ("exaone_moe", {"first_last_k_dense_replace": 2}, UnsupportedError, "first_last_k_dense_replace = 2"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, ConfigError, "mlp_layer_types: has 1 values for 4 layers"),
        ("hy_v3", {"route_norm": False}, UnsupportedError, "route_norm = False"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    kind: str, changes: dict[str, Any], error: type[RooflineError], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_hf(Path("config.json"), {**FIELDS, "model_type": kind, **changes})


_MINIMAX_FP8 = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
_MINIMAX_FP8 |= {
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **{"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 131072},
        **{"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_scaling": None},
        **{"moe_intermediate_size": 1408, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "use_qk_norm": False},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    },
    "minimax_m2": {
        **{"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064, "max_position_embeddings": 196608},
        **{"attn_type_list": [1] * 62, "rotary_dim": 64, "rope_theta": 5e6, "num_local_experts": 256},
        **{"num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
        **{"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3},
        **{"mtp_transformer_layers": 1, "quantization_config": _MINIMAX_FP8, "tie_word_embeddings": False},
        "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    },
    "ernie4_5_moe": {
        **{"hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20},
        **{"num_key_value_heads": 4, "vocab_size": 103424, "max_position_embeddings": 131072, "rope_theta": 500000},
        **{"use_bias": False, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        **{"moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_k": 6, "moe_intermediate_size": 1536},
        **{"tie_word_embeddings": True, "num_nextn_predict_layers": 1},
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configurations_of_the_form_of_published_ones_are_read_whole(kind: str) -> None:
    fields = {"model_type": kind, **PUBLISHED[kind]}
    assert unread_keys(Path("config.json"), fields) == []
    mine = config_of(from_hf(Path("config.json"), fields))
    expected = {"glm4_moe": (128, 8, 64), "minimax_m2": (256, 8, 64), "ernie4_5_moe": (64, 6, None)}[kind]
    assert (mine.experts, mine.experts_per_token, mine.rotary_dim) == expected  # type: ignore[attr-defined]


def test_layers_that_guess_further_tokens_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the last layer alone, and by what they hold: a layer that a file has too many is no such one."""
    torch = pytest.importorskip("torch", reason="transformers writes the model")
    pytest.importorskip("safetensors", reason="it writes the layers behind the last")
    from safetensors.torch import load_file, save_file

    from roofline.weights.checkpoint import open_checkpoint
    from tests.models.parity_cases import CASES, theirs

    folder = tmp_path / "model"
    theirs(CASES["hy_v3"].config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.1.")}
    behind = {name.replace("layers.1.", "layers.2."): value.clone() for name, value in last.items()}
    guessing = {f"model.layers.2.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(
        {**tensors, **behind, **guessing, "model.layers.2.eh_proj.weight": torch.ones(64, 128)},
        folder / "model.safetensors",
    )
    with caplog.at_level(logging.WARNING, "roofline"):
        source = open_checkpoint(folder)
    assert source.config["layers"] == 2
    assert len(source.unused) == len(behind) + 4
    assert "tensors that are no part of the model are not used" in caplog.text
    save_file({**tensors, **behind}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.2\..*num_hidden_layers"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("glm4moe", {}, ("sigmoid", False, 0, [])),
        ("glm4moe", {"expert_shared_count": 2, "expert_weights_norm": True}, ("sigmoid", True, 64, [])),
        ("glm4moe", {"expert_gating_func": 1, "leading_dense_block_count": 1}, ("softmax", False, 0, [0])),
        ("glm4moe", {"block_count": 5, "nextn_predict_layers": 1}, ("sigmoid", False, 0, [])),
        ("dots1", {"expert_gating_func": 2, "expert_shared_count": 1}, ("sigmoid", False, 32, [])),
        ("olmoe", {}, ("softmax", False, 0, [])),
        ("hunyuan-moe", {}, ("softmax", True, 32, [])),
        ("minimax-m2", {}, ("sigmoid", True, 0, [])),
        ("ernie4_5-moe", {"expert_shared_feed_forward_length": 48}, ("softmax", True, 48, [])),
        ("exaone-moe", {"attention.sliding_window": 9, "expert_gating_func": 2}, ("sigmoid", False, 0, [])),
    ],
)
def test_keys_of_gguf_files_say_what_llama_cpp_takes(
    architecture: str, keys: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    mine = config_of(_gguf(architecture, keys))
    assert (mine.score, mine.renormalise, mine.shared_ffn, list(mine.dense)) == expected  # type: ignore[attr-defined]
    assert (mine.layers, mine.ffn) == (4, 96 if architecture == "olmoe" else 32)


def test_gguf_files_with_what_is_not_computed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expert_gating_func = 4"):
        _gguf("glm4moe", {"expert_gating_func": 4})
    with pytest.raises(ConfigError, match="expert_group_used_count"):
        _gguf("glm4moe", {"expert_group_count": 2, "expert_group_used_count": 3})
    with pytest.raises(UnsupportedError, match="interleave_moe_layer_step = 2"):
        _gguf("ernie4_5-moe", {"interleave_moe_layer_step": 2})
    with pytest.raises(UnsupportedError, match=r"attention\.sliding_window = 9"):
        _gguf("dots1", {"attention.sliding_window": 9})


def _gguf(architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        **{"block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96},
        **{"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "expert_feed_forward_length": 32},
        **{"expert_count": 8, "expert_used_count": 2},
    }
    metadata = {f"{architecture}.{key}": value for key, value in (keys | changes).items()}
    metadata["general.architecture"] = architecture
    return from_gguf(Path("m.gguf"), metadata, {"embed.weight": (50, 64)}, None)


def test_solar_open_is_read_as_a_glm_without_dense_layers() -> None:
    torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
    from roofline.torch.checkpoint import checkpoint_of
    from tests.models.parity_cases import Eager

    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "num_experts_per_tok": 2}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = transformers.SolarOpenConfig(
        **{**FIELDS, **sizes, **ids, "num_hidden_layers": 2, "initializer_range": 0.1}
    )
    torch.manual_seed(0)
    model = transformers.SolarOpenForCausalLM(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    source = checkpoint_of(model)
    assert (source.config["family"], source.config["rope_theta"], source.config.get("dense")) == ("glm4_moe", 1e6, None)
    text = list(range(40))
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0].numpy()
    np.testing.assert_allclose(Eager(source).step(text), expected, atol=1e-5)


def test_gguf_files_of_hy_3_say_by_tensors_which_layers_have_experts() -> None:
    """Nothing says so there, and the bias that chooses experts has a name of its own."""
    pytest.importorskip("torch", reason="the cases import it")
    from roofline.weights import names
    from roofline.weights.config.to_gguf import to_gguf
    from tests.models.parity_cases import CASES

    config = {**CASES["hy_v3"].config, "dense": [1], "rope_style": "half"}
    shapes = {"embed.weight": (96, 64), "head.weight": (96, 64), "layers.1.mlp.gate.weight": (96, 64)}
    metadata, _ = to_gguf(config, {**shapes, "layers.0.mlp.choice.bias": (6,)})
    assert metadata["hy_v3.feed_forward_length"] == 96
    assert "hy_v3.leading_dense_block_count" not in metadata
    assert names.to_gguf("hy_v3", "layers.0.mlp.choice.bias") == "blk.0.exp_probs_b"
    assert names.from_gguf("hy_v3", "blk.0.exp_probs_b") == "layers.0.mlp.choice.bias"
    assert names.to_gguf("glm4_moe", "layers.0.mlp.choice.bias") == "blk.0.exp_probs_b.bias"
