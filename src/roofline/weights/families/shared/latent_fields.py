"""What readers of models with attention over compressed keys and values share: names of tensors, and sizes."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config

ATTENTION = {
    "attn.q": ("attn_q", "self_attn.q_proj"),
    "attn.q_down": ("attn_q_a", "self_attn.q_a_proj"),
    "attn.q_norm": ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    "attn.q_up": ("attn_q_b", "self_attn.q_b_proj"),
    "attn.kv_down": ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    "attn.kv_norm": ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    "attn.kv_up": ("attn_kv_b", "self_attn.kv_b_proj"),
    "attn.k_up": ("attn_k_b", ""),
    "attn.v_up": ("attn_v_b", ""),
    "attn.o": ("attn_output", "self_attn.o_proj"),
}
OF_HEADS = (".attn.k_up.weight", ".attn.v_up.weight")  # a matrix of each head
_LARGEST = 1 << 14
_BETA, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = (_BETA, "max_position_embeddings")  # the second says again what stands outside
# What transformers takes where a file of Mistral 4 says nothing of rope.
_PUBLISHED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, _CONTEXT: 8192, "beta_fast": 32.0}
_PUBLISHED |= {"beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1}


def hf_attention(fields: Fields, heads: int) -> Config:
    """What a config.json says of the sizes of heads and of compressed rows."""
    needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, plain, turned, value = (_size(fields, name, 1, fields.need(name, int)) for name in needed)
    if value > plain + turned:
        fields.refuse("v_head_dim", f"{value} is above the {plain + turned} of a key")
    if turned % 2:
        fields.refuse("qk_rope_head_dim", f"{turned} is odd; rope turns pairs")
    if fields.get("num_key_value_heads", int, heads) != heads:
        fields.refuse("num_key_value_heads", f"is not the {heads} heads, for each of which keys and values are made")
    # transformers writes what rope turns, and takes neither from there.
    if fields.get("head_dim", int, turned) not in (turned, plain + turned):
        fields.refuse("head_dim", f"is neither {turned} nor {plain + turned}, as the sizes of q and k say")
    queries = _size(fields, "q_lora_rank", 0, fields.get("q_lora_rank", int, 0))
    dims = {"head_dim": plain + turned, "rotary_dim": turned, "value_dim": value}
    plain_config: Config = {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    return {"kv_heads": heads, "kv_rank": rank, "q_rank": queries, **dims, **plain_config}


def flag(fields: Fields, name: str, absent: bool) -> bool:
    """A flag that null turns off."""
    return fields.get(name, bool, False if name in fields.values else absent)


def hf_style(fields: Fields) -> Config:
    """Which dimensions are turned together."""
    return {"rope_style": "interleaved" if flag(fields, "rope_interleave", True) else "half"}


def _size(fields: Fields, name: str, least: int, value: int) -> int:
    if not least <= value <= _LARGEST:
        fields.refuse(name, f"{value} is not from {least} to {_LARGEST}")
    return value


def attention_to_hf(config: Config) -> Config:
    """The inverse of `hf_attention`."""
    turned = config["rotary_dim"]
    return {
        "head_dim": turned,
        "q_lora_rank": config.get("q_rank") or None,
        "kv_lora_rank": config["kv_rank"],
        "qk_nope_head_dim": config["head_dim"] - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": config["value_dim"],
    }


def hf_scaled_queries(fields: Fields, ours: Config) -> Config:
    """Mistral 4's rope, and what its queries are multiplied by."""
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    if fields.get(name, dict) is None:
        fields = fields.changed({name: _PUBLISHED})
    table = fields.inside(name)
    part = ours["rotary_dim"] / ours["head_dim"]
    if table.get("partial_rotary_factor", float, part) != part:
        table.refuse("partial_rotary_factor", f"is not the {part:g} of a head that qk_rope_head_dim says")
    theta, scaling = hf_fields.rope(fields, partial=True, honoured=_ROPE)
    beta = table.need(_BETA, float)
    if beta < 0:
        table.refuse(_BETA, f"{describe(beta)} is below 0")
    context = (scaling or {}).get(_CONTEXT) or table.need(_CONTEXT, float)
    if context < 1 or context != int(context):
        table.refuse(_CONTEXT, f"{describe(context)} is no whole number of at least 1")
    factors = {"query_beta": beta, "query_context": int(context)} if beta else {}
    return {"rope_theta": theta, "rope_scaling": scaling, **factors}


def scaled_queries_to_hf(config: Config, fields: Config) -> Config:
    """The inverse of `hf_scaled_queries`, into the fields that are there."""
    beta, context = config.get("query_beta", 0.0), config.get("query_context") or config["max_position"]
    factors = {_BETA: beta, _CONTEXT: context, "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    tables = {name: fields[name] | factors for name in ("rope_parameters", "rope_scaling") if name in fields}
    return fields | tables


# --- GGUF ----------------------------------------------------------------------------------------------------------

_KV_RANK, _Q_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_SHARP, _SCALE, _LENGTH = (
    "rope.scaling.yarn_log_multiplier",
    "attention.temperature_scale",
    "attention.temperature_length",
)
GGUF_KEYS: tuple[str, ...] = (
    _KV_RANK,
    _Q_RANK,
    _KEY,
    _VALUE,
    f"{_KEY}_mla",
    f"{_VALUE}_mla",
    "rope.dimension_count",
    _SHARP,
)
GGUF_KEYS += (_SCALE, _LENGTH)
# Of files without experts, which llama.cpp reads as if there were some behind the last layer.
GGUF_DENSE: tuple[str, ...] = (
    "leading_dense_block_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_weights_norm",
)
GGUF_DENSE += ("expert_weights_scale", "expert_gating_func")


def gguf_heads(fields: Fields) -> Fields:
    """The fields of a file with the sizes of the heads that keys are made for: those of files with the matrices of keys
    and values apart are of the one head that these share."""
    heads = fields.need("attention.head_count", int)
    changes: Config = {"attention.head_count_kv": heads}
    for name in (_KEY, _VALUE):
        changes |= {name: fields.need(f"{name}_mla", int)} if f"{name}_mla" in fields.values else {}
    return fields.changed(changes)


def gguf_attention(model: gguf_fields.GgufModel, config: Config) -> Config:
    """What is attention's own; fields: those of `gguf_heads`."""
    fields, scaling = model.fields, config["rope_scaling"]
    value = _size(fields, _VALUE, 1, fields.get(_VALUE, int, config["head_dim"]))
    if value > config["head_dim"]:
        fields.refuse(_VALUE, f"{value} is above the {config['head_dim']} of a key")
    if "rotary_dim" not in config:
        fields.refuse("rope.dimension_count", f"leaves nothing of {config['head_dim']} unturned")
    queries = _size(fields, _Q_RANK, 0, fields.get(_Q_RANK, int, 0))
    sizes: Config = {
        "kv_rank": _size(fields, _KV_RANK, 1, fields.need(_KV_RANK, int)),
        "q_rank": queries,
        "value_dim": value,
    }
    if any(name.endswith(OF_HEADS) for name in model.shapes):
        sizes["latent"] = True
    if scaling and scaling["rope_type"] == "yarn":
        weight = fields.get(_SHARP, float, 0.0)
        if weight <= 0:
            what = f"{fields.path}: {fields.within}{_SHARP} = {weight:g} beside YaRN"
            raise UnsupportedError(what, "models of this architecture sharpen their softmax by it")
        weight = round(10 * weight, 6)  # converters write a tenth
        sizes["rope_scaling"] = {**scaling, "mscale": weight, "mscale_all_dim": weight}
    elif scaling and fields.get(_SHARP, float, 0.0):
        what = f"{fields.path}: {fields.within}{_SHARP} beside {scaling['rope_type']} scaling of rope"
        raise UnsupportedError(what, "the softmax is sharpened under YaRN alone")
    return sizes


def attention_to_gguf(config: Config) -> Config:
    """The inverse. Raises UnsupportedError for what such files cannot say."""
    scaling, rank, turned = config["rope_scaling"] or {}, config["kv_rank"], config["rotary_dim"]
    weight = scaling.get("mscale_all_dim", 0.0)
    is_yarn = scaling.get("rope_type") == "yarn"
    stretched = is_yarn and not 0 < weight == scaling.get("mscale")
    unsaid = {"halves of a head turned": config["rope_style"] == "half", "YaRN that changes lengths": stretched}
    gguf_fields.refuse_unsaid(config, unsaid)
    keys: Config = {_KV_RANK: rank, _Q_RANK: config.get("q_rank", 0), "rope.dimension_count": turned}
    keys |= {"attention.head_count_kv": 1, _KEY: rank + turned, _VALUE: rank}
    keys |= {f"{_KEY}_mla": config["head_dim"], f"{_VALUE}_mla": config["value_dim"]}
    keys |= {_SHARP: 0.1 * weight} if is_yarn else {}
    if config.get("query_beta"):
        keys |= {_SCALE: config["query_beta"], _LENGTH: config["query_context"]}
    return keys


def gguf_scaled_queries(fields: Fields, config: Config) -> Config:
    """What the queries of Mistral 4 are multiplied by."""
    beta = fields.get(_SCALE, float, 0.0) and fields.positive(_SCALE)
    if not beta:
        return {}
    original = fields.get("rope.scaling.original_context_length", int, config["max_position"])
    return {"query_beta": beta, "query_context": fields.get(_LENGTH, int, original)}
