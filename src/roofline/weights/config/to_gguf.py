"""The canonical configuration -> GGUF metadata: the inverse of `config.gguf.from_gguf`, and checked against it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.models.latent import ROW_EPS
from roofline.models.registry import configure
from roofline.ops.rope_tables import LONGROPE, PROPORTIONAL, YARN_BETA_FAST, YARN_BETA_SLOW, RopeTable, frequencies
from roofline.weights.config.gguf import from_gguf
from roofline.weights.families.shared.gguf_fields import GGUF_LONGROPE, GGUF_ROPE_FACTORS, GgufForm
from roofline.weights.families.table import WritesGguf, files_of
from roofline.weights.files.mapped import JsonObject

_KEYS = {
    "block_count": "layers",
    "context_length": "max_position",
    "embedding_length": "width",
    "feed_forward_length": "ffn",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab",
}
_ROPE_KEYS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Architectures whose windows llama.cpp computes.
_WINDOWED = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss", "olmo2", "exaone-moe", "mimo2")
_WINDOWED_IN_LAYERS = {"exaone4": 64}  # and those that have windows for it where they have so many layers
_RAMPED = ("mistral3",)  # architectures of which it reads where YaRN's ramp ends
# That may have divisors of the rope frequencies there.
_DIVIDED = ("llama", "granite", "granitemoe", "arcee", "mistral3", "exaone4", "exaone-moe", "exaone")
# That must have a head there.
_WITH_HEAD = ("gptneox", "olmo2", "gpt-oss", "qwen2moe", "dots1", "olmoe", "minimax-m2", "exaone-moe", "mimo2")
_CAP_OF_GEMMA3N = 30.0
_SAME = 1e-6  # relative difference that float32 numbers in the file bring


def form_of(config: JsonObject) -> GgufForm:
    """How a GGUF file says a configuration. Raises UnsupportedError where none that we write can."""
    files = files_of(config["family"])
    if not isinstance(files, WritesGguf):
        what = f"a GGUF file of a {config['family']} model"
        raise UnsupportedError(
            what, "there is no architecture of that kind in the files that we write", ("safetensors",)
        )
    return files.to_gguf(dict(config))


def read_otherwise(config: JsonObject) -> list[str]:
    """What llama.cpp computes otherwise than a file of ours says, or does not load, as its version of October 2026 was
    seen to."""
    form, window = form_of(config), max([config["sliding_window"] or 0, *config.get("layer_windows", ())])
    notes = []
    has_windows = form.architecture in _WINDOWED or _WINDOWED_IN_LAYERS.get(form.architecture) == config["layers"]
    if window and not has_windows:
        what = f"llama.cpp computes the architecture {form.architecture} without the window of {window:,} tokens"
        notes.append(f"{what} that the file says: in longer texts its answers are others")
    scaling = config["rope_scaling"] or {}
    unloaded = f"llama.cpp does not load the architecture {form.architecture}"
    if scaling.get("rope_type") == "llama3" and form.architecture not in _DIVIDED:
        notes.append(f"{unloaded} with the tensor {GGUF_ROPE_FACTORS}, in which files have this scaling of rope")
    if config["tied"] and form.architecture in _WITH_HEAD:
        notes.append(f"{unloaded} without a head of its own, which this model shares with the embedding")
    if form.architecture == "gemma3n" and config.get("sharing_layers"):
        what = "without keys and values of the layers that read those of others, which this model does not have"
        notes.append(f"{unloaded} {what}")
    if form.architecture == "gemma4" and not _shares_as_llama_cpp(config):
        what = "llama.cpp ends itself over the architecture gemma4 where keys and values are read of other layers than"
        notes.append(f"{what} the last two that have some, the first of them with a window")
    if form.architecture == "gemma3n" and config["logit_cap"] != _CAP_OF_GEMMA3N:
        notes.append(
            f"llama.cpp caps the logits of the architecture gemma3n at {_CAP_OF_GEMMA3N:g}, whatever a file says"
        )
    ramp = (scaling.get("beta_fast", YARN_BETA_FAST), scaling.get("beta_slow", YARN_BETA_SLOW))
    if ramp != (YARN_BETA_FAST, YARN_BETA_SLOW) and form.architecture not in _RAMPED:
        what = f"llama.cpp computes YaRN of the architecture {form.architecture} with the usual ends of its ramp"
        notes.append(f"{what}, {YARN_BETA_FAST:g} and {YARN_BETA_SLOW:g}, and not with those that the file says")
    if scaling.get("truncate") is False:
        what = "llama.cpp rounds the ends of YaRN's ramp to whole dimensions"
        notes.append(f"{what}, which transformers and we do not for this model: its answers are others")
    if config.get("kv_rank") and config["norm_eps"] != ROW_EPS:
        what = f"llama.cpp norms the compressed rows of attention with an epsilon of {config['norm_eps']:g}"
        notes.append(f"{what}, as other rows, and not with {ROW_EPS:g}: its logits differ a little")
    return notes


def _shares_as_llama_cpp(config: JsonObject) -> bool:
    """Whether the layers that read the keys and values of others read those that llama.cpp takes: of the two before
    them the first where a layer has a window, and the second where it has none."""
    sharing, windows = config.get("sharing_layers", 0), config.get("layer_windows") or ()
    before = windows[: config["layers"] - sharing][-2:]
    return not sharing or [window > 0 for window in before] == [True, False]


def to_gguf(
    config: JsonObject, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """The metadata of the architecture, and the tensors that say what the frequencies of rope are divided by, float32
    [head_dim / 2], by their names in a file.

    shapes: canonical name -> shape of the parameters.

    Raises UnsupportedError where a file with this metadata would be read as another configuration.
    """
    form = form_of(config)
    values: dict[str, object] = {key: config[ours] for key, ours in _KEYS.items()}
    values |= {form.epsilon: config["norm_eps"], "rope.freq_base": config["rope_theta"]}
    if config["sliding_window"] is not None:
        values["attention.sliding_window"] = config["sliding_window"]
    scaling = dict(config["rope_scaling"] or {})
    kind = scaling.pop("rope_type", None)
    factors = form.rope_factors
    if kind == "llama3":
        factors = _llama3_factors(config)
    elif kind is not None and kind not in (LONGROPE, PROPORTIONAL):
        values["rope.scaling.type"] = kind
        values |= {_ROPE_KEYS[key]: _rope_value(key, value) for key, value in scaling.items() if key in _ROPE_KEYS}
    values |= form.keys
    metadata: dict[str, object] = {"general.architecture": form.architecture, "general.type": "model"}
    for key, value in values.items():
        if value is not None:
            metadata[f"{form.architecture}.{key}"] = _float32(value) if isinstance(value, float) else value
    _check(config, from_gguf(Path("the GGUF file"), metadata, shapes, factors, form.longrope), form.rope_style)
    tensors = {name: form.longrope[key] for name, key in GGUF_LONGROPE.items() if key in form.longrope}
    return metadata, tensors | ({} if factors is None else {GGUF_ROPE_FACTORS: factors})


def _is_same(read: object, value: object) -> bool:
    """Whether a file has a field's value: its numbers are float32."""
    if isinstance(read, float) and isinstance(value, float):
        return bool(np.isclose(read, value, rtol=_SAME, atol=0))
    return read == value


def _float32(value: float) -> float:
    return float(np.float32(value))


def _rope_value(key: str, value: float) -> int | float:
    return int(value) if key == "original_max_position_embeddings" and value == int(value) else _float32(value)


def _llama3_factors(config: JsonObject) -> np.ndarray:
    """What each frequency is divided by."""
    scaled, _ = frequencies(RopeTable.of(config["head_dim"], config["rope_theta"], "half", config["rope_scaling"]))
    plain, _ = frequencies(RopeTable.of(config["head_dim"], config["rope_theta"], "half", None))
    return (plain / scaled).astype(np.float32)


def _check(config: JsonObject, read: JsonObject, rope_style: str) -> None:
    """Raise UnsupportedError unless a configuration that was read back computes the same."""
    (_, before), (_, after) = configure(config), configure(read)
    tables = (frequencies(each.rope) if each.head_dim else (np.zeros(0), 1.0) for each in (before, after))
    (ours, our_factor), (theirs, their_factor) = tables
    same_rope = ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=_SAME, atol=0)
    same_rope = same_rope and bool(np.isclose(our_factor, their_factor, rtol=_SAME))
    rope_scaling = after.rope_scaling if same_rope else before.rope_scaling
    expected = replace(before, rope_style=rope_style, rope_scaling=rope_scaling)
    for name, value in vars(expected).items():
        if not _is_same(getattr(after, name), value) or not same_rope:
            field = name if same_rope else "rope_scaling"
            what = f"{field} = {getattr(before, field)!r} in a GGUF file"
            raise UnsupportedError(what, "it would be read back as another value", ("safetensors",))
