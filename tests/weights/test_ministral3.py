"""Files of Ministral 3: what transformers and llama.cpp take from each spelling of what queries are multiplied by."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.registry import configure
from roofline.ops.rope_tables import frequencies
from roofline.weights.config.gguf import from_gguf
from roofline.weights.config.hf import from_hf
from roofline.weights.config.to_gguf import to_gguf
from roofline.weights.to_hf import hf_config
from tests.models.parity_cases import CASES, MINISTRAL3

HF: dict[str, Any] = {
    **{"model_type": "ministral3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 50, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
}
HF |= {"max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 3e4}
BETA = {"llama_4_scaling_beta": 0.3}
OLD = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"rope_parameters": None, "rope_scaling": None},
    "nothing beside an outer theta": {"rope_theta": 5e4},
    "yarn": {"rope_parameters": YARN | BETA},
    "type": {"rope_parameters": OLD | BETA},
    "rope_scaling": {"rope_scaling": OLD | BETA, "rope_theta": 2e4},
    "both": {"rope_scaling": OLD | BETA, "rope_parameters": {"rope_theta": 3e4} | BETA},
    "an outer original context": {"rope_parameters": YARN | BETA, "original_max_position_embeddings": 96},
    "no original context": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0} | BETA},
    "without YaRN": {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 64} | BETA},
    "linear": {"rope_parameters": YARN | {"rope_type": "linear", "original_max_position_embeddings": 48} | BETA},
    "the context again": {"rope_parameters": YARN | BETA | {"max_position_embeddings": 512}},
    "no window": {"sliding_window": None},
    "a window": {"sliding_window": 40},
}


def read(changes: dict[str, Any], absent: tuple[str, ...] = ()) -> dict[str, Any]:
    values = {key: value for key, value in (HF | copy.deepcopy(changes)).items() if key not in absent}
    return from_hf(Path("config.json"), values)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_config_is_read_as_transformers_reads_it(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its classes say what is expected")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, cfg = configure(read(SPELLINGS[name]))
    theirs = transformers.Ministral3Config(**copy.deepcopy(HF | SPELLINGS[name]))
    rope = theirs.rope_parameters
    expected, factor = rope["rope_theta"] ** (-np.arange(0, cfg.head_dim, 2) / cfg.head_dim), 1.0
    if rope["rope_type"] != "default":
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")  # the outer context goes into `rope`
        expected = inverse.double().numpy()
    ours, our_factor = frequencies(cfg.rope)
    assert np.allclose(ours, expected, rtol=1e-5, atol=0)
    assert our_factor == pytest.approx(factor)
    factors = cfg.query_factors(0)
    assert factors is not None
    assert (factors.beta, factors.context) == (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    assert (cfg.head_dim, cfg.kv_heads, cfg.norm_eps) == (16, theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (cfg.sliding_window, cfg.tied) == (theirs.sliding_window, theirs.tie_word_embeddings)


def test_sizes_that_a_config_does_not_say_are_those_of_the_type() -> None:
    transformers = pytest.importorskip("transformers", reason="its class says what is expected")
    theirs = transformers.Ministral3Config(hidden_size=64, num_attention_heads=16)
    ours = read({"num_attention_heads": 16}, ("head_dim", "num_key_value_heads"))
    assert (ours["head_dim"], ours["kv_heads"]) == (theirs.head_dim, theirs.num_key_value_heads) == (128, 8)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (YARN, "rope_parameters.llama_4_scaling_beta"),
        (YARN | {"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta: the number -0.1 is below 0"),
        (YARN | {"llama_4_scaling_beta": "x"}, "llama_4_scaling_beta"),
        ({"rope_type": "default"} | BETA, "rope_parameters.original_max_position_embeddings"),
        (YARN | BETA | {"original_max_position_embeddings": 64.5}, "no whole number"),
        ({"rope_type": "default", "original_max_position_embeddings": 0} | BETA, "no whole number of at least 1"),
    ],
)
def test_what_transformers_would_not_compute_with_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"rope_parameters": rope})


def test_queries_that_are_multiplied_by_one_are_those_of_llama() -> None:
    assert read({"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}})["family"] == "llama"
    with pytest.raises(UnsupportedError, match="llama_4_scaling_beta"):  # where its type does not read it
        read({"model_type": "llama", "rope_parameters": YARN | BETA})
    with pytest.raises(ConfigError, match="query_context=16 is not the 32"):
        configure(MINISTRAL3 | {"query_context": 16})


def metadata(changes: dict[str, Any], without: str = "") -> dict[str, Any]:
    """That of a file of ours of the architecture, changed."""
    config = MINISTRAL3 | {"rope_scaling": MINISTRAL3["rope_scaling"] | {"mscale_all_dim": 0.5}}
    values, _ = to_gguf(config, {"embed.weight": (96, 64), "head.weight": (96, 64)})
    kept = {key: value for key, value in values.items() if not without or not key.endswith(without)}
    return kept | {f"mistral3.{key}": value for key, value in changes.items()}


def gguf(changes: dict[str, Any], without: str = "") -> dict[str, Any]:
    return from_gguf(
        Path("m.gguf"), metadata(changes, without), {"embed.weight": (96, 64), "head.weight": (96, 64)}, None
    )


def test_gguf_says_the_scale_and_the_original_context() -> None:
    written = metadata({})
    assert written["general.architecture"] == "mistral3"
    assert written["mistral3.attention.temperature_scale"] == pytest.approx(0.4)
    assert written["mistral3.rope.scaling.yarn_log_multiplier"] == 0.5
    assert written["mistral3.rope.scaling.original_context_length"] == 32
    config = gguf({})
    assert (config["query_beta"], config["query_context"]) == (pytest.approx(0.4), 32)
    assert config["rope_scaling"]["mscale_all_dim"] == 0.5
    assert "mscale" not in gguf({}, "yarn_log_multiplier")["rope_scaling"]
    assert gguf({}, "attention.temperature_scale")["family"] == "llama"
    assert gguf({"attention.temperature_scale": 0.0})["family"] == "llama"
    without = gguf({"rope.scaling.type": "none"}, "original_context_length")
    assert (without["query_context"], without["rope_scaling"]) == (1024, None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention.temperature_scale": -0.1}, ConfigError, "attention.temperature_scale"),
        ({"rope.scaling.yarn_log_multiplier": -1.0}, ConfigError, "yarn_log_multiplier"),
        ({"attention.temperature_length": 64}, UnsupportedError, "attention.temperature_length"),
    ],
)
def test_gguf_files_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gguf(changes)


def test_a_factor_of_the_angles_that_gguf_has_no_key_for_is_refused() -> None:
    config = MINISTRAL3 | {"rope_scaling": MINISTRAL3["rope_scaling"] | {"mscale": 0.7}}
    with pytest.raises(UnsupportedError, match="rope_scaling"):
        to_gguf(config, {"embed.weight": (96, 64), "head.weight": (96, 64)})
    without = {key: value for key, value in MINISTRAL3["rope_scaling"].items() if key != "mscale"}
    written, _ = to_gguf(MINISTRAL3 | {"rope_scaling": without}, {"embed.weight": (96, 64), "head.weight": (96, 64)})
    assert "mistral3.rope.scaling.yarn_log_multiplier" not in written


@pytest.mark.parametrize("name", ["ministral3", "ministral3_plain"])
def test_transformers_reads_what_is_written(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="it reads what is written")
    fields = hf_config(dict(CASES[name].config))
    rope = transformers.AutoConfig.for_model(**fields).rope_parameters
    config = CASES[name].config
    assert rope["llama_4_scaling_beta"] == config["query_beta"]
    assert rope["original_max_position_embeddings"] == config["query_context"]
