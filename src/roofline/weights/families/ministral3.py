"""Files of Ministral 3."""

from roofline.common.fields import Fields, describe
from roofline.weights.families import llama
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked

NAMES = llama.NAMES
_BETA, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = (_BETA, "max_position_embeddings")  # the second says again what stands outside
_GGUF = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
# What transformers takes where the file says nothing of rope.
_PUBLISHED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _CONTEXT: 16384, "beta_fast": 32.0}
_PUBLISHED |= {"beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; one that multiplies queries by 1 alone is Llama's."""
    hf_fields.refuse_features(fields)
    ours = hf_fields.sizes(fields, "ministral3", hf_fields.REQUIRED)
    ours["kv_heads"] = fields.get("num_key_value_heads", int, 8)
    ours["head_dim"] = hf_fields.head_dim(fields, None if "head_dim" in fields.values else 128)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": llama.window(fields, None)}
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    if fields.get(name, dict) is None:
        fields = fields.changed({"rope_parameters": _PUBLISHED})
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields, honoured=_ROPE)
    return checked(fields, _with_factors(fields.inside(name), ours), hf_fields.SPELLED)


def _with_factors(table: Fields, ours: Config) -> Config:
    """The configuration with what queries are multiplied by; transformers has no default for what says it."""
    beta = table.need(_BETA, float)
    if beta < 0:
        table.refuse(_BETA, f"{describe(beta)} is below 0")
    context = (ours["rope_scaling"] or {}).get(_CONTEXT) or table.need(_CONTEXT, float)
    if context < 1 or context != int(context):
        table.refuse(_CONTEXT, f"{describe(context)} is no whole number of at least 1")
    return ours | _factors(beta, int(context))


def _factors(beta: float, context: int) -> Config:
    return {"query_beta": beta, "query_context": context} if beta else {"family": "llama"}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "ministral3", "Ministral3") | {"sliding_window": config["sliding_window"]}
    factors = {_BETA: config["query_beta"], _CONTEXT: config["query_context"]}
    for name in ("rope_parameters", "rope_scaling"):
        if name in fields:
            fields[name] = fields[name] | factors
    return fields | {"pad_token_id": None}  # the type's default may be no id of a small vocabulary


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; files of this architecture without a scale are Mistral's."""
    config = llama.read_gguf(model, "ministral3", _GGUF)
    fields, scaling = model.fields, config["rope_scaling"]
    if scaling and scaling["rope_type"] == "yarn" and fields.get(_GGUF[1], float, 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": fields.positive(_GGUF[1])}
    beta = fields.get(_GGUF[0], float, 0.0) and fields.positive(_GGUF[0])
    context = fields.get("rope.scaling.original_context_length", int, config["max_position"])
    return config | _factors(beta or 0.0, context)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """The scale has a key of its own, the length that it goes by is the original context."""
    keys = {_GGUF[0]: config["query_beta"], "rope.scaling.original_context_length": config["query_context"]}
    scaling = config["rope_scaling"] or {}
    weight = scaling.get("mscale") and scaling.get("mscale_all_dim")  # llama.cpp takes 1 for the first
    return gguf_fields.GgufForm("mistral3", "interleaved", keys | ({_GGUF[1]: weight} if weight else {}))
