"""Files of DeepSeek-V2."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import EACH_EXPERT, EXPERTS, expert_size, hf_experts
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.tensor_names import MLP, NORMS, TensorNames

NAMES = TensorNames(
    NORMS
    | EXPERTS
    | EACH_EXPERT
    | MLP
    | {
        "attn.q": ("attn_q", "self_attn.q_proj"),
        "attn.q_down": ("attn_q_a", "self_attn.q_a_proj"),
        "attn.q_norm": ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        "attn.q_up": ("attn_q_b", "self_attn.q_b_proj"),
        "attn.kv_down": ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        "attn.kv_norm": ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        "attn.kv_up": ("attn_kv_b", "self_attn.kv_b_proj"),
        "attn.o": ("attn_output", "self_attn.o_proj"),
        "mlp.router": ("ffn_gate_inp", "mlp.gate"),
        "mlp.shared.gate": ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        "mlp.shared.up": ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    },
    hf_apart=stacked_experts_apart,
)
# auto_map: old files name classes of their own, with this mathematics.
_HONOURED = ("n_routed_experts", "num_experts", "auto_map")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "norm_topk_prob": (False,),
    "scoring_func": ("softmax",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
}
_GREEDY = "greedy"


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, _HONOURED)
    refuse_unless_neutral(fields, _NEUTRAL)
    method = fields.get("topk_method", str, _GREEDY)
    if method != _GREEDY:
        reason = "experts are chosen among all, and not among those of the best groups"
        raise UnsupportedError(f"{fields.path}: topk_method = {shorten(method)}", reason, (_GREEDY,))
    ours = hf_fields.sizes(fields, "deepseek")
    ours["rope_style"] = "interleaved"
    ours |= _attention(fields, ours["heads"])
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    ours |= hf_experts(fields, "n_routed_experts") | {"renormalise": False}
    dense = fields.get("first_k_dense_replace", int, 0)
    if not 0 <= dense <= ours["layers"]:
        fields.refuse("first_k_dense_replace", f"{dense} is not from 0 to the {ours['layers']} layers")
    ours |= {"dense_layers": dense, "dense_ffn": ours["ffn"] if dense else 0}
    ours["ffn"] = expert_size(fields, "moe_intermediate_size")
    ours["shared_ffn"] = ours["ffn"] * _optional(fields, "n_shared_experts", 2)
    ours["routed_scale"] = fields.positive("routed_scaling_factor") or 1.0
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    return checked(fields, ours, hf_fields.SPELLED | {"ffn": "moe_intermediate_size", "head_dim": "qk_nope_head_dim"})


def _attention(fields: Fields, heads: int) -> Config:
    """What the sizes of heads and of compressed rows say."""
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
    queries = _optional(fields, "q_lora_rank", 1536)
    dims = {"head_dim": plain + turned, "rotary_dim": turned, "value_dim": value}
    return {"kv_heads": heads, "kv_rank": rank, "q_rank": queries, **dims}


def _optional(fields: Fields, name: str, absent: int) -> int:
    """A size, 0 where the file says null. absent: what transformers takes where it says nothing."""
    return _size(fields, name, 0, fields.get(name, int, 0 if name in fields.values else absent))


def _size(fields: Fields, name: str, least: int, value: int) -> int:
    if not least <= value <= 1 << 14:
        fields.refuse(name, f"{value} is not from {least} to {1 << 14}")
    return value


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    turned = config["rotary_dim"]
    written = {key: value for key, value in config.items() if key != "rotary_dim"}
    written["ffn"] = config.get("dense_ffn") or config["ffn"]
    return hf_fields.to_hf(written, "deepseek_v2", "DeepseekV2") | {
        "head_dim": turned,
        "q_lora_rank": config.get("q_rank") or None,
        "kv_lora_rank": config["kv_rank"],
        "qk_nope_head_dim": config["head_dim"] - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": config["value_dim"],
        "moe_intermediate_size": config["ffn"],
        "n_routed_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
        "n_shared_experts": config.get("shared_ffn", 0) // config["ffn"],
        "first_k_dense_replace": config.get("dense_layers", 0),
        "routed_scaling_factor": config.get("routed_scale", 1.0),
        "norm_topk_prob": False,
        "topk_method": _GREEDY,
    }
