"""Windows and tables of rope by kind of layer, in every spelling, are what transformers' own classes make of them."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="its classes say what is expected")

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError  # noqa: E402
from roofline.models.registry import config_of  # noqa: E402
from roofline.ops.rope_tables import RopeTable, frequencies  # noqa: E402
from roofline.weights.config.gguf import from_gguf  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.config.to_gguf import to_gguf  # noqa: E402
from roofline.weights.config.unread_keys import unread_keys  # noqa: E402
from roofline.weights.names import parameter_shapes  # noqa: E402
from roofline.weights.to_hf import hf_config  # noqa: E402
from tests.models.parity_cases import CASES  # noqa: E402
from tests.weights.gguf_families import GGUF_CASES  # noqa: E402

KINDS = ("full_attention", "sliding_attention")
LAYERS = 8  # both kinds are among them, whatever the pattern
FIELDS: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 50, "intermediate_size": 96, "max_position_embeddings": 512, "head_dim": 16},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 2e4}


def ours(kind: str, changes: dict[str, Any]) -> Any:
    """Our configuration; None where we refuse it."""
    try:
        return config_of(from_hf(Path("config.json"), {**FIELDS, "model_type": kind, **changes}))
    except RooflineError:
        return None


def theirs(kind: str, changes: dict[str, Any]) -> Any:
    """Transformers' configuration; None where it refuses it."""
    try:
        return transformers.CONFIG_MAPPING[kind](**copy.deepcopy({**FIELDS, **changes}))
    except Exception:  # of whatever type
        return None


def assert_same_table(table: RopeTable, config: Any, parameters: dict[str, Any], kind: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    mine, factor = frequencies(table)
    if parameters["rope_type"] == "default":
        expected, their_factor = parameters["rope_theta"] ** (-np.arange(0, 16, 2) / 16), 1.0
    else:
        inverse, their_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", layer_type=kind)
        expected = inverse.double().numpy()
    np.testing.assert_allclose(mine, expected, rtol=1e-5)
    assert factor == pytest.approx(their_factor)


def spellings() -> list[dict[str, Any]]:
    """Tables for each kind, for one, for none and for all, beside rope_scaling and thetas."""
    tables: list[dict[str, Any] | None] = [None, {}, dict.fromkeys(KINDS), PLAIN, LINEAR, {"rope_theta": 3e4}]
    tables += [{KINDS[0]: full} for full in (PLAIN, YARN, {**YARN, "rope_theta": 7e4}, {"type": "linear", "factor": 2})]
    tables += [{KINDS[0]: YARN, KINDS[1]: local} for local in (PLAIN, {"rope_theta": 7e4}, LINEAR, None)]
    tables += [{KINDS[1]: PLAIN}]
    scalings: list[dict[str, Any] | None] = [None, {}, YARN, {"type": "linear", "factor": 8.0}, {"rope_theta": 9e4}]
    thetas: list[dict[str, Any]] = [{}, {"rope_theta": 6e4}, {"rope_local_base_freq": 5e3}]
    pairs = itertools.product(tables, scalings, thetas)
    return [{"rope_parameters": table, "rope_scaling": scaling, **theta} for table, scaling, theta in pairs]


@pytest.mark.parametrize(("kind", "least"), [("olmo3", 40), ("gemma3_text", 60)])
def test_tables_by_kind_are_read_as_transformers_reads_them(kind: str, least: int) -> None:
    honoured = 0
    for rope in spellings():
        mine, config = ours(kind, rope), theirs(kind, rope)
        if mine is None or config is None:
            continue
        for layer in range(LAYERS):
            name = config.layer_types[layer]
            assert (mine.window(layer) > 0) == (name == KINDS[1])
            assert_same_table(mine.rope_of(layer), config, config.rope_parameters[name], name)
        honoured += 1
    assert honoured >= least


def test_what_transformers_would_lose_is_refused() -> None:
    def read(kind: str, **changes: Any) -> None:
        from_hf(Path("config.json"), {**FIELDS, "model_type": kind, **changes})

    with pytest.raises(UnsupportedError, match=r"rope_parameters\.rope_theta of all kinds of layers"):
        read("olmo3", rope_parameters={"rope_theta": 3e4})
    with pytest.raises(ConfigError, match=r"rope_theta: 60000 is not read for layers with a window"):
        read("olmo3", rope_theta=6e4)
    with pytest.raises(ConfigError, match=r"rope_scaling\.type: is not read: call it rope_type"):
        read("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0})
    with pytest.raises(UnsupportedError, match=r"rope_parameters\.sliding_attention with a scaling"):
        read("olmo3", rope_parameters={KINDS[1]: YARN})
    with pytest.raises(UnsupportedError, match=r"full_attention\.truncate .*take it away"):
        read("olmo3", rope_scaling=YARN | {"truncate": False})
    with pytest.raises(UnsupportedError, match="use_cla = True"):
        read("hunyuan_v1_dense", use_cla=True)
    with pytest.raises(UnsupportedError, match="use_qk_norm = False"):
        read("hunyuan_v1_dense", use_qk_norm=False)


@pytest.mark.parametrize(("kind", "least"), [("olmo3", 15), ("exaone4", 25)])
def test_windows_are_read_as_transformers_reads_them(kind: str, least: int) -> None:
    mixed = [KINDS[layer in (1, 4)] for layer in range(LAYERS)]
    windows: list[dict[str, Any]] = [{}, *({"sliding_window": value} for value in (None, 8, 4096))]
    types: list[dict[str, Any]] = [{}, *({"layer_types": value} for value in (None, mixed, [KINDS[0]] * LAYERS))]
    types += [{"layer_types": [KINDS[1]] * LAYERS}]
    patterns: list[dict[str, Any]] = [{}, *({"sliding_window_pattern": value} for value in (None, 1, 3, "LLG"))]
    honoured = 0
    for window, layer_types, pattern in itertools.product(windows, types, patterns):
        changes = window | layer_types | (pattern if kind == "exaone4" else {})
        mine, config = ours(kind, changes), theirs(kind, changes)
        if mine is None or config is None:
            continue
        for layer in range(LAYERS):
            slides = config.layer_types[layer] == KINDS[1]
            assert mine.window(layer) == (config.sliding_window if slides else 0), changes
            turns = kind == "olmo3" or config.sliding_window is None or slides
            assert (mine.rope_of(layer) is not None) == turns, changes
        honoured += 1
    assert honoured >= least


def test_the_alpha_of_hunyuan_is_read_as_transformers_reads_it() -> None:
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    published = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    dynamic = {"rope_type": "dynamic", "alpha": 50, "rope_theta": 3e4, "factor": 1.0}
    scalings: list[dict[str, Any] | None] = [None, published, dynamic, YARN, {**dynamic, "alpha": 0}, {"alpha": 3.0}]
    honoured = 0
    for new, old, theta in itertools.product(scalings, scalings, ({}, {"rope_theta": 5e4})):
        changes = {"rope_parameters": new, "rope_scaling": old, **theta}
        mine, config = ours("hunyuan_v1_dense", changes), theirs("hunyuan_v1_dense", changes)
        if mine is None or config is None:
            continue
        table = HunYuanDenseV1RotaryEmbedding(config)
        expected, factor = frequencies(mine.rope)
        np.testing.assert_allclose(expected, table.inv_freq.double().numpy(), rtol=1e-5)
        assert factor == pytest.approx(table.attention_scaling)
        honoured += 1
    assert honoured >= 15
    assert ours("hunyuan_v1_dense", {"rope_scaling": published}).rope_theta == pytest.approx(1e4 * 1000 ** (16 / 14))
    assert ours("hunyuan_v1_dense", {"rope_scaling": {**dynamic, "alpha": 0}}) is None


@pytest.mark.parametrize("kind", ["seed_oss", "ernie4_5", "helium", "exaone4", "hunyuan_v1_dense", "olmo3"])
def test_sizes_that_are_absent_or_null_are_those_of_transformers(kind: str) -> None:
    for key, how in itertools.product(
        ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"), (0, 1)
    ):
        changes: dict[str, Any] = {"num_attention_heads": 32, key: None}
        fields = {k: v for k, v in {**FIELDS, **changes}.items() if how or k != key}
        try:
            config = transformers.CONFIG_MAPPING[kind](**fields)
            mine = config_of(from_hf(Path("config.json"), {**fields, "model_type": kind}))
        except Exception:  # of whatever type: what is refused is no model to compare with
            continue
        assert mine.kv_heads == config.num_key_value_heads, (key, how)
        assert mine.norm_eps == config.rms_norm_eps, (key, how)
        assert mine.tied == config.tie_word_embeddings, (key, how)
        if getattr(config, "head_dim", None) is not None:
            assert mine.head_dim == config.head_dim, (key, how)


_LAYERS_32B = [KINDS[(layer + 1) % 4 != 0] for layer in range(64)]
PUBLISHED: dict[str, dict[str, Any]] = {
    "seed_oss": {
        **{"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "max_position_embeddings": 524288},
        **{"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1},
        **{"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    },
    "exaone4": {
        **{"hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64, "num_attention_heads": 40},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 131072},
        **{"layer_types": _LAYERS_32B, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "rope_theta": 1e6},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    },
    "olmo3": {
        **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 32, "vocab_size": 100278, "max_position_embeddings": 65536, "rope_theta": 500000},
        **{"layer_types": _LAYERS_32B[:32], "sliding_window": 4096, "attention_bias": False},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32.0},
            **{"beta_slow": 1.0, "original_max_position_embeddings": 8192},
        },
    },
    "hunyuan_v1_dense": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 120818, "max_position_embeddings": 262144},
        **{"use_qk_norm": True, "use_cla": False, "num_experts": 1, "attention_bias": False, "mlp_bias": False},
        "rope_scaling": {
            **{"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
            **{"mscale": 1.0, "mscale_all_dim": 0.0},
        },
    },
    "ernie4_5": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424, "max_position_embeddings": 131072},
        **{"use_bias": False, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True},
        "auto_map": {"AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"},
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configurations_of_the_form_of_published_ones_are_read_whole(kind: str) -> None:
    fields = {"model_type": kind, **PUBLISHED[kind]}
    assert unread_keys(Path("config.json"), fields) == []
    mine = config_of(from_hf(Path("config.json"), fields))
    config = transformers.CONFIG_MAPPING[kind](**copy.deepcopy(PUBLISHED[kind]))
    assert (mine.vocab, mine.norm_eps, mine.tied) == (
        config.vocab_size,
        config.rms_norm_eps,
        config.tie_word_embeddings,
    )
    parameters = config.rope_parameters
    theta = parameters.get(KINDS[0], parameters)["rope_theta"]
    assert mine.rope_theta == pytest.approx(theta * (1000 ** (128 / 126) if kind == "hunyuan_v1_dense" else 1))


# --- GGUF ----------------------------------------------------------------------------------------------------------


def gguf(architecture: str, **changes: Any) -> Any:
    keys: dict[str, Any] = {
        **{"block_count": 4, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96},
        **{"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5},
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    return config_of(
        from_gguf(Path("m.gguf"), {"general.architecture": architecture, **metadata}, {"embed.weight": (50, 64)}, None)
    )


def windows_of(config: Any) -> list[int]:
    return [config.window(layer) for layer in range(config.layers)]


def test_windows_of_gguf_files_are_a_list_or_a_number_or_the_architectures() -> None:
    window = {"attention__sliding_window": 9}
    assert windows_of(gguf("olmo2")) == [0] * 4
    assert windows_of(gguf("olmo2", **window)) == [9, 9, 9, 0]
    assert windows_of(gguf("olmo2", **window, attention__sliding_window_pattern=2)) == [9, 0, 9, 0]
    listed = {"attention__sliding_window_pattern": [False, True, True, False]}
    for architecture in ("olmo2", "exaone4", "gemma2", "gemma3"):
        assert windows_of(gguf(architecture, **window, **listed)) == [0, 9, 9, 0]
    with pytest.raises(ConfigError, match="has 3 values for 4 layers"):
        gguf("olmo2", **window, attention__sliding_window_pattern=[True] * 3)
    with pytest.raises(ConfigError, match=r"rope\.freq_base_swa: 10000 is not rope\.freq_base"):
        gguf("olmo2", **window, rope__freq_base_swa=1e4)


def test_exaone_has_windows_in_64_layers_and_turns_only_there() -> None:
    small, large = gguf("exaone4"), gguf("exaone4", block_count=64)
    assert windows_of(small) == [0] * 4
    assert all(small.turning)
    assert windows_of(large) == [4096, 4096, 4096, 0] * 16
    assert list(large.turning) == [True, True, True, False] * 16


def test_the_factor_that_converters_write_of_yarn_is_its_own() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0}
    yarn |= {"rope__scaling__original_context_length": 64}
    plain = gguf("olmo2", **yarn)
    for factor in (1.0, float(np.float32(1 + 0.1 * np.log(8)))):
        assert gguf("olmo2", **yarn, rope__scaling__yarn_attn_factor=factor) == plain
    for keys in (yarn, {}):
        with pytest.raises(UnsupportedError, match=r"yarn_attn_factor = 1\.5"):
            gguf("olmo2", **keys, rope__scaling__yarn_attn_factor=1.5)


def test_hunyuan_files_have_an_alpha_and_no_expert() -> None:
    assert gguf("hunyuan-dense", rope__scaling__alpha=50.0).rope_theta == pytest.approx(5e5 * 50 ** (16 / 14))
    assert gguf("hunyuan-dense", expert_count=1).rope_theta == 5e5
    with pytest.raises(UnsupportedError, match="expert_count = 8"):
        gguf("hunyuan-dense", expert_count=8)


def by_layer() -> list[str]:
    return [name for name, case in CASES.items() if case.config.get("layer_windows")]


@pytest.mark.parametrize("name", by_layer())
@pytest.mark.parametrize("window", [2**31, 2**63])
def test_a_window_of_layers_that_is_beyond_reason_is_refused_by_name(name: str, window: int) -> None:
    fields = hf_config(dict(CASES[name].config)) | {"sliding_window": window}
    with pytest.raises(ConfigError, match=r"sliding_window: the number .* is not from 1 to 1073741824"):
        from_hf(Path("config.json"), fields)


@pytest.mark.parametrize("name", [name for name in by_layer() if name in GGUF_CASES])
def test_a_window_of_a_gguf_file_that_is_beyond_reason_is_refused_by_name(name: str) -> None:
    config = dict(GGUF_CASES[name].config)
    shapes = parameter_shapes(config)
    metadata, _ = to_gguf(config, shapes)
    key = f"{metadata['general.architecture']}.attention.sliding_window"
    assert metadata[key] == 9
    with pytest.raises(ConfigError, match=r"attention\.sliding_window: .* is not from 1 to 1073741824"):
        from_gguf(Path("m.gguf"), metadata | {key: 2**63}, shapes, None)
