"""Files of OPT."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config, check_integer, checked, refuse_unless_neutral
from roofline.weights.families.shared.gguf_fields import GgufModel
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    layer={
        "attn_norm": ("", "self_attn_layer_norm"),
        "attn.q": ("", "self_attn.q_proj"),
        "attn.k": ("", "self_attn.k_proj"),
        "attn.v": ("", "self_attn.v_proj"),
        "attn.o": ("", "self_attn.out_proj"),
        "mlp_norm": ("", "final_layer_norm"),
        "mlp.up": ("", "fc1"),
        "mlp.down": ("", "fc2"),
    },
    top={
        "embed": ("", "model.decoder.embed_tokens"),
        "positions": ("", "model.decoder.embed_positions"),
        "project_in": ("", "model.decoder.project_in"),
        "project_out": ("", "model.decoder.project_out"),
        "final_norm": ("", "model.decoder.final_layer_norm"),
        "head": ("", "lm_head"),
    },
    hf_layers="model.decoder.layers",
)
REQUIRED = {"ffn_dim" if key == "intermediate_size" else key: name for key, name in hf_fields.REQUIRED.items()}
_SPELLED = {ours: theirs for theirs, ours in REQUIRED.items()}
_NEUTRAL: dict[str, tuple[object, ...]] = {"layer_norm_elementwise_affine": (True,)}
_EPSILON = 1e-5  # of torch's layer norm: files of OPT do not say it


def from_gguf(model: GgufModel, architecture: str) -> Config:
    """Refuses: GGUF files have no names for the tensors of OPT."""
    raise UnsupportedError(f"{model.fields.path}: architecture {architecture!r}", "we have no names for its tensors")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields)
    refuse_unless_neutral(fields, _NEUTRAL)
    ours = hf_fields.sizes(fields, "opt", REQUIRED)
    ours |= {"kv_heads": ours["heads"], "head_dim": hf_fields.divided(fields, ours, "num_attention_heads")}
    ours |= {"norm_eps": _EPSILON, "tied": fields.get("tie_word_embeddings", bool, True)}
    ours["bias"] = fields.get("enable_bias", bool, True)
    ours |= hf_fields.activation(fields, "activation_function", "relu")
    if not fields.get("do_layer_norm_before", bool, True):
        ours |= {"norm_first": False, "last_norm": False}
    elif fields.get("_remove_final_layer_norm", bool, False):
        ours["last_norm"] = False
    narrow = fields.get("word_embed_proj_dim", int, ours["width"])
    check_integer(fields, "word_embed_proj_dim", "width", narrow)
    ours |= {} if narrow == ours["width"] else {"embed_width": narrow}
    return checked(fields, ours | hf_fields.learned_positions(), _SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    first = config.get("norm_first", True)
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        **{theirs: config[ours] for theirs, ours in REQUIRED.items()},
        "word_embed_proj_dim": config.get("embed_width") or config["width"],
        "do_layer_norm_before": first,
        "_remove_final_layer_norm": first and not config.get("last_norm", True),
        "enable_bias": config["bias"],
        "activation_function": hf_fields.activation_to_hf(config),
    }
