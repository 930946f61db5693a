"""What config.json of Jamba and Bamba say of layers and heads, as transformers reads it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.models.registry import configure
from roofline.weights.config.hf import from_hf
from roofline.weights.families import jamba

transformers = pytest.importorskip("transformers", reason="its classes say which layers attend")

PATH = Path("config.json")
JAMBA: dict[str, Any] = {"model_type": "jamba", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
BAMBA = JAMBA | {"model_type": "bamba", "mamba_n_heads": 8, "attn_layer_indices": [1, 3], "num_hidden_layers": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_period": 3, "expert_layer_offset": 0},
        {"attn_layer_period": 40, "expert_layer_period": 1, "expert_layer_offset": 0},
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_local_experts": 4},
        {"num_hidden_layers": 5, "expert_layer_period": 7, "expert_layer_offset": 6},
    ],
)
def test_layers_of_jamba_are_those_of_transformers(fields: dict[str, Any]) -> None:
    theirs = transformers.JambaConfig(**{key: value for key, value in (JAMBA | fields).items() if key != "model_type"})
    read = from_hf(PATH, JAMBA | fields)
    assert read["recurrent"] == [kind == "mamba" for kind in theirs.layers_block_type]
    sparse = [layer for layer, count in enumerate(theirs.layers_num_experts) if count > 1]
    assert read.get("experts", 0) == (theirs.num_experts if sparse else 0)
    if sparse:
        assert read["dense"] == [layer for layer in range(read["layers"]) if layer not in sparse]
    assert read["rank"] == theirs.mamba_dt_rank


@pytest.mark.parametrize(
    ("fields", "turned"),
    [
        ({}, 8),
        ({"partial_rotary_factor": 0.25}, 8),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}}, 4),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}}, 16),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attn_rotary_emb": 8}, 8),
    ],
)
def test_as_much_of_a_head_of_bamba_turns_as_in_transformers(fields: dict[str, Any], turned: int) -> None:
    theirs = transformers.BambaConfig(**{key: value for key, value in (BAMBA | fields).items() if key != "model_type"})
    assert int(16 * theirs.rope_parameters["partial_rotary_factor"]) == turned
    read = from_hf(PATH, BAMBA | fields)
    assert (read.get("rotary_dim") or read["head_dim"]) == turned
    assert read["recurrent"] == [kind == "linear_attention" for kind in theirs.layers_block_type]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (JAMBA | {"attn_layer_offset": 8}, ConfigError, "attn_layer_offset: the number 8 is not from 0 to 7"),
        (JAMBA | {"expert_layer_period": 0}, ConfigError, "expert_layer_period: the number 0 is not from 1"),
        (JAMBA | {"mamba_proj_bias": True}, UnsupportedError, "mamba_proj_bias"),
        (JAMBA | {"mamba_inner_layernorms": False}, UnsupportedError, "mamba_inner_layernorms"),
        (JAMBA | {"sliding_window": 64}, UnsupportedError, "sliding_window"),
        (JAMBA | {"num_experts_per_tok": 17}, ConfigError, "num_experts_per_tok: the number 17 is not from 1 to 16"),
        (JAMBA | {"attn_layer_period": 40, "attn_layer_offset": 39}, UnsupportedError, "without attention"),
        (BAMBA | {"attn_layer_indices": [1, 5]}, ConfigError, "attn_layer_indices: 5 is not the number of one of 5"),
        (BAMBA | {"attn_layer_indices": None}, UnsupportedError, "without attention"),
        (BAMBA | {"attn_rotary_emb": 16}, UnsupportedError, "attn_rotary_emb"),
        (BAMBA | {"layer_types": ["full_attention"] * 5}, UnsupportedError, "layer_types"),
        (BAMBA | {"mamba_n_heads": 7}, ConfigError, "mamba_n_heads"),
    ],
)
def test_what_they_do_not_have_is_refused(fields: dict[str, Any], error: type[RooflineError], message: str) -> None:
    with pytest.raises(error, match=message):
        configure(from_hf(PATH, fields))


def test_layers_that_mix_or_choose_otherwise_are_not_alike() -> None:
    """Of four layers the third attends, the second and the fourth have experts."""
    fields = JAMBA | {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2}
    cfg = configure(from_hf(PATH, fields))[1]
    assert [cfg.alike(layer) for layer in range(4)] == [0, 1, 2, 1]
    assert cfg.first(3) == configure(from_hf(PATH, fields | {"num_hidden_layers": 3}))[1]


def test_adapters_leave_out_the_module_that_transformers_passes_by() -> None:
    torch = pytest.importorskip("torch", reason="transformers' model runs in it")
    sizes = {"num_hidden_layers": 5, "vocab_size": 99, "intermediate_size": 64, "mamba_dt_rank": 4, "num_experts": 1}
    config = transformers.CONFIG_MAPPING["jamba"](**JAMBA | sizes, num_experts_per_tok=1, use_mamba_kernels=False)
    model, called = transformers.AutoModelForCausalLM.from_config(config).eval(), set[str]()
    mixer = model.model.layers[0].mamba
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        getattr(mixer, name).register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert called == {"in_proj", "x_proj", "out_proj"}
    assert jamba.NAMES.unadapted == ("ssm.dt",)
