"""Files of EXAONE 3 and 3.5, whose model is Llama's. Published ones have GPT-2's names of modules and of keys."""

import re
from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families import llama
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.joined_experts import renamed
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames
from roofline.weights.quantised.method import TensorSource

_MODULES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h": "model.layers",
    "attn.attention.out_proj": "self_attn.o_proj",
    "attn.attention": "self_attn",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc_0": "mlp.gate_proj",
    "mlp.c_fc_1": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_MODULE = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, _MODULES))})(?=\.)")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    """With the names that transformers has in memory."""
    return renamed(source, lambda name: _MODULE.sub(lambda match: _MODULES[match[1]], name))


NAMES = TensorNames(NORMS | ATTENTION | MLP, hf_apart=_apart)
_DEFAULTS = {"vocab_size": 102_400, "intermediate_size": 14_336, "num_key_value_heads": 8}
_DEFAULTS |= {"max_position_embeddings": 4096}
_KEYS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
_BIASES = ("attention_bias", "mlp_bias")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Published files have an auto_map to classes of this mathematics."""
    changes = {ours: fields.values[key] for key, ours in _KEYS.items() if fields.values.get(key) is not None}
    fields = hf_fields.with_defaults(fields.changed(changes), _DEFAULTS)
    ours = hf_fields.decoder(fields, "exaone", (*_BIASES, "auto_map"), eps=1e-5, theta=5e5)
    hf_fields.biases(fields, ours)
    ours["sliding_window"] = llama.no_window(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    biases = {"attention_bias": config["attention_bias"], "mlp_bias": config.get("mlp_bias", False)}
    return hf_fields.to_hf(config, "exaone", "Exaone") | biases


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute no rows."""
    gguf_fields.refuse_window(model.fields)
    return gguf_fields.read(model, "exaone", "half")


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    gguf_fields.refuse_unsaid(config, {"biases": config["attention_bias"] or config.get("mlp_bias")})
    return gguf_fields.GgufForm("exaone", "half")
