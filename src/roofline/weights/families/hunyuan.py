"""Files of Hunyuan (dense)."""

from collections.abc import Collection

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

QK_NORMS = {
    "attn.q_norm": ("attn_q_norm", "self_attn.query_layernorm"),
    "attn.k_norm": ("attn_k_norm", "self_attn.key_layernorm"),
}
NAMES = TensorNames(NORMS | ATTENTION | MLP | QK_NORMS)
_HONOURED = ("attention_bias", "use_qk_norm", "num_experts", "auto_map")  # the last: classes of the same mathematics
_NEUTRAL: dict[str, tuple[object, ...]] = {"use_qk_norm": (True,), "num_experts": (0, 1), "use_cla": (False,)}
# What stands beside alpha, which alone says how far theta is moved.
_BESIDE_ALPHA = {"alpha", "type", "rope_type", "rope_theta", "factor", "beta_fast", "beta_slow"}
_BESIDE_ALPHA |= {"mscale", "mscale_all_dim"}
_EXPERTS = ("expert_count", "expert_used_count")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    refuse_unless_neutral(fields, _NEUTRAL)
    return checked(fields, decoder(fields, "hunyuan", _HONOURED) | {"qk_norm": True}, hf_fields.SPELLED)


def decoder(fields: Fields, family: str, honoured: Collection[str]) -> Config:
    """The canonical configuration without its norms of q and k, as `hf_fields.decoder`; a scaling that files call
    dynamic, and that has an alpha, is another theta."""
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    table = fields.inside(name)
    alpha = table.positive("alpha") if table.values.get("alpha") else None  # 0 is none
    kind = table.get("rope_type", str) or table.get("type", str)
    plain = fields
    if kind == "dynamic" and alpha:
        new = sorted(table.values.keys() - _BESIDE_ALPHA)
        if new:
            what = f"{fields.path}: {table.within}{shorten(new[0])}"
            raise UnsupportedError(what, "we do not know what it does to the mathematics")
        plain = fields.changed({name: {"rope_type": "default", "rope_theta": table.values.get("rope_theta")}})
    ours = hf_fields.decoder(plain, family, honoured, eps=1e-5)
    hf_fields.biases(fields, ours)
    if kind == "dynamic" and alpha:
        ours["rope_theta"] = _theta_by(fields, ours, alpha)
    return ours


def _theta_by(fields: Fields, ours: Config, alpha: float) -> float:
    """The theta that an alpha makes of the one that stands there."""
    dim = ours["head_dim"]
    if dim <= 2:
        fields.refuse("rope_scaling", f"has an alpha, which says nothing of heads of {dim}")
    return float(ours["rope_theta"] * alpha ** (dim / (dim - 2)))


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "hunyuan_v1_dense", "HunYuanDenseV1") | {"attention_bias": config["attention_bias"]}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; a single expert is none."""
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "hunyuan", "half", ("rope.scaling.alpha", *_EXPERTS))
    refuse_unless_neutral(model.fields, dict.fromkeys(_EXPERTS, (0, 1)))
    alpha = model.fields.get("rope.scaling.alpha", float, 0.0)
    if alpha > 0:
        config["rope_theta"] = _theta_by(model.fields, config, alpha)
    return config | {"qk_norm": True, "attention_bias": biased(model, "attn.q", "attn.k", "attn.v")}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    gguf_fields.refuse_unsaid(config, {"biases of attention": config["attention_bias"]})
    return gguf_fields.GgufForm("hunyuan-dense", "half")
