"""Each key of each family's config.json left out, null, with another value, or in an older spelling: read as
transformers reads it, or refused.

The quick tests compare configurations: a variant means what transformers' class makes of it, with all defaults written
out. The slow ones compare logits of random weights, where what no configuration says would show too.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="transformers' models are torch's")
transformers = pytest.importorskip("transformers", reason="it is what is compared with")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from tests.models.folder_rows import our_rows, their_rows  # noqa: E402
from tests.models.parity_cases import CASES, ENCODERS, encoder_of, their_config, theirs  # noqa: E402

MIXTURE = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_experts_per_tok": 2}
OF_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**MIXTURE, "intermediate_size": 48, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**MIXTURE, "intermediate_size": 48, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
        | {"num_experts": 4},
    ),
    "qwen3_moe": ("Qwen3Moe", {**MIXTURE, "intermediate_size": 48, "moe_intermediate_size": 48, "num_experts": 4}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 512}),
}
NAMES = [*CASES, *ENCODERS, *OF_CLASSES]
_FIRST = {case.kind: name for name, case in reversed((CASES | ENCODERS).items())}  # one of each model_type
QUICK = [*_FIRST.values(), "phi3_long", "gpt_neox_serial", *OF_CLASSES]
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "quick_gelu")
# Keys of the class that all of transformers' configurations are, of which none says what a model computes: the quick
# run varies them in some models, the slow one in all.
OF_ALL_TYPES = (
    *("_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "output_attentions", "output_hidden_states"),
    *("problem_type", "return_dict", "transformers_version", "use_cache"),
)
# One table of frequencies is loaded, transformers has two and takes one by the length of the text: docs/models.md.
BY_LENGTH = {("phi3_long", "original_max_position_embeddings"), ("phi3_short", "original_max_position_embeddings")}
BY_LENGTH |= {("phi3_short", "max_position_embeddings")}


def model_of(name: str) -> Any:
    if name in CASES:
        return theirs(CASES[name].config)
    if name in ENCODERS:
        return encoder_of(ENCODERS[name].config, ENCODERS[name].kind)
    kind, fields = OF_CLASSES[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in key))
    return model


def config_of(name: str) -> Any:
    """transformers' configuration of the model, as it stands in the model."""
    if name in OF_CLASSES:
        kind, fields = OF_CLASSES[name]
        return getattr(transformers, f"{kind}Config")(**fields)
    case = (CASES | ENCODERS)[name]
    made = their_config(case.config, case.kind if name in ENCODERS else "")
    made.dtype = torch.float32
    return made


Variant = tuple[str, dict[str, Any]]


def without(fields: Mapping[str, Any]) -> Iterator[Variant]:
    """Each key left out, and null; also those inside of objects."""
    for key, value in fields.items():
        yield f"{key} absent", {other: each for other, each in fields.items() if other != key}
        if value is not None:
            yield f"{key} null", {**fields, key: None}
        if isinstance(value, dict):
            for label, inside in without(value):
                yield f"{key}.{label}", {**fields, key: inside}


def changed(fields: Mapping[str, Any]) -> Iterator[Variant]:
    """Each key with other values of its type."""
    for key, value in fields.items():
        if key in ("vocab_size", "model_type"):
            continue
        values: list[Any] = []
        if isinstance(value, bool):
            values = [not value]
        elif isinstance(value, int):
            values = [each for each in (value + 1, 2 * value, value // 2) if each != value]
        elif isinstance(value, float):
            values = [1.5 * value, 0.0, int(value)]
        elif value is None:
            values = [True, 3, 0.5]
        elif "activation" in key or "act" in key.split("_"):
            values = [*ACTIVATIONS]
        elif key == "layer_types":
            values = [["full_attention"] * len(value), ["sliding_attention"] * len(value), value[::-1]]
        for each in values:
            yield f"{key} = {each}", {**fields, key: each}
        if isinstance(value, dict):
            for label, inside in changed(value):
                yield f"{key}.{label}", {**fields, key: inside}


def older(fields: Mapping[str, Any]) -> Iterator[Variant]:
    """rope_theta, rope_scaling and torch_dtype in the place of rope_parameters and dtype."""
    scaling = copy.deepcopy(fields.get("rope_parameters"))
    if not scaling or "full_attention" in scaling:
        return
    apart = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    kind = scaling.pop("rope_type", "default")
    base = {key: value for key, value in fields.items() if key not in ("rope_parameters", "dtype", *apart)}
    base |= {"torch_dtype": "float32"}
    for spelled in ("rope_type", "type"):
        for place in ("rope_scaling", "rope_parameters"):
            yield f"{place} with {spelled}", {**base, **apart, place: {spelled: kind, **scaling}}
    if kind == "default":
        yield "no scaling", base | apart
        yield "rope_scaling null", base | apart | {"rope_scaling": None}
        yield "theta alone", {**base, "rope_theta": 123.0}
    yield "two thetas", {**base, "rope_theta": 77.0, "rope_parameters": {"rope_type": kind, **scaling, **apart}}


def respelled(fields: Mapping[str, Any]) -> Iterator[Variant]:
    """Keys of the type under the names that transformers has for all types, and GPT-NeoX's of rope."""
    for common, own in transformers.CONFIG_MAPPING[fields["model_type"]].attribute_map.items():
        if own in fields:
            others = {key: value for key, value in fields.items() if key != own}
            yield f"{common} for {own}", {**others, common: fields[own]}
            yield f"{common} beside {own}", {**fields, common: fields[own]}
    if fields["model_type"] == "gpt_neox":
        plain = {key: value for key, value in fields.items() if key != "rope_parameters"}
        turned = fields["rope_parameters"]["partial_rotary_factor"]
        yield "rotary_emb_base", {**plain, "rotary_emb_base": 123.0}
        yield "rotary_pct", {**plain, "rotary_emb_base": 123.0, "rotary_pct": turned}
        scaling = {"type": "linear", "factor": 2.0}
        yield "rotary_pct scaled", {**plain, "rotary_emb_base": 123.0, "rotary_pct": turned, "rope_scaling": scaling}


def variants(fields: Mapping[str, Any]) -> Iterator[Variant]:
    yield from without(fields)
    yield from changed(fields)
    yield from older(fields)
    yield from respelled(fields)


def ours(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The canonical configuration, None where it is refused."""
    try:
        return from_hf(Path("config.json"), dict(fields))
    except (ConfigError, UnsupportedError):
        return None


def written_out(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers' class makes of it; None where it refuses it."""
    copied = copy.deepcopy(dict(fields))
    try:
        made: dict[str, Any] = transformers.AutoConfig.for_model(copied.pop("model_type"), **copied).to_dict()
    except Exception:  # of whatever type: what it refuses is no model to compare with
        return None
    return made


def compared_variants(name: str, skipped: tuple[str, ...]) -> int:
    """How many variants of a model's configuration were compared, without those of keys that begin so."""
    fields = json.loads(json.dumps(config_of(name).to_dict()))
    compared = 0
    for label, variant in variants(fields):
        if label.startswith(("model_type", *skipped)):
            continue
        mine = ours(variant)
        full = None if mine is None else written_out(variant)
        if full is None:
            continue
        meant = ours(full)
        assert meant is not None, f"{label}: as transformers writes it out it is refused"
        assert mine == meant, label
        compared += 1
    return compared


# The slow run has models that differ most, the soak run all; of each type the quick test below compares what is read.
COMPUTED = ("llama", "gemma3", "qwen2_moe", "mpt", "bert")


@pytest.mark.parametrize("name", QUICK)
def test_a_configuration_means_what_transformers_makes_of_it(name: str) -> None:
    assert compared_variants(name, () if name in COMPUTED else OF_ALL_TYPES) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in QUICK if name not in COMPUTED])
def test_keys_of_all_types_mean_what_transformers_makes_of_them(name: str) -> None:
    assert compared_variants(name, ()) > 30


MORE = [pytest.param(name, marks=pytest.mark.soak) for name in NAMES if name not in COMPUTED]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMPUTED, *MORE])
def test_a_variant_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    is_encoder = name in ENCODERS
    model_of(name).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    compared = 0
    for label, variant in variants(fields):
        if (name, label.split()[0]) in BY_LENGTH:
            continue
        (tmp_path / "config.json").write_text(json.dumps(variant))
        mine = our_rows(tmp_path, is_encoder)
        expected = None if mine is None else their_rows(tmp_path, is_encoder)
        if mine is None or expected is None:
            continue
        assert mine.shape == expected.shape, label
        assert np.abs(mine - expected).max() < 1e-4, label
        compared += 1
    assert compared > 30
