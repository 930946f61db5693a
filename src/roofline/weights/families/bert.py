"""Files of BERT, RoBERTa and XLM-RoBERTa."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    layer={
        "attn.q": ("attn_q", "attention.self.query"),
        "attn.k": ("attn_k", "attention.self.key"),
        "attn.v": ("attn_v", "attention.self.value"),
        "attn.o": ("attn_output", "attention.output.dense"),
        "attn_norm": ("attn_output_norm", "attention.output.LayerNorm"),
        "mlp.up": ("ffn_up", "intermediate.dense"),
        "mlp.down": ("ffn_down", "output.dense"),
        "mlp_norm": ("layer_output_norm", "output.LayerNorm"),
    },
    top={
        "embed": ("token_embd", "embeddings.word_embeddings"),
        "types": ("token_types", "embeddings.token_type_embeddings"),
        "positions": ("position_embd", "embeddings.position_embeddings"),
        "embed_norm": ("token_embd_norm", "embeddings.LayerNorm"),
    },
    hf_layers="encoder.layer",
    hf_prefix="",
    hf_before=("bert.", "roberta."),
    # What stands behind the hidden rows: the layer of transformers' pooler_output, and heads of masked-language models.
    hf_unread=r"(bert\.|roberta\.)?(pooler\.dense\.(weight|bias)|embeddings\.(position|token_type)_ids)|"
    r"(cls|lm_head)\.[\w.]+",
)
REQUIRED = {key: name for key, name in hf_fields.REQUIRED.items() if name != "max_position"}
_SPELLED = {ours: theirs for theirs, ours in hf_fields.REQUIRED.items()} | {"norm_eps": "layer_norm_eps"}
_NEUTRAL: dict[str, tuple[object, ...]] = {"position_embedding_type": ("absolute",), "is_decoder": (False,)}
_PADDED = ("roberta", "xlm-roberta")  # count positions from behind their padding id


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; that the activation is gelu is no key of such files, but of the architecture. Their
    tables of positions begin with position 0, of RoBERTa too."""
    if model.fields.get("attention.causal", bool, True):
        model.fields.refuse("attention.causal", "is not false, which it is of an encoder")
    gguf_fields.refuse_rope(model.fields)
    config = gguf_fields.read(model, "bert", "half", ("attention.causal",), gguf_fields.EPSILON)
    config |= hf_fields.learned_positions() | {"bias": True}
    for name, parameter in (("token_types", "types.weight"), ("max_position", "positions.weight")):
        if parameter in model.shapes:  # else it is missed where names are compared
            config[name] = model.shapes[parameter][0]
    return config


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, ("hidden_act",))
    refuse_unless_neutral(fields, _NEUTRAL)
    ours = hf_fields.sizes(fields, "bert", REQUIRED)
    first = fields.get("pad_token_id", int, 1) + 1 if model_type in _PADDED else 0
    if not 0 <= first < 1 << 16:
        fields.refuse("pad_token_id", f"{first - 1} is no padding id")
    ours["max_position"] = fields.need("max_position_embeddings", int) - first
    ours |= {"kv_heads": ours["heads"], "head_dim": hf_fields.divided(fields, ours, "num_attention_heads")}
    ours |= {"norm_eps": fields.get("layer_norm_eps", float, 1e-12), "tied": True, "bias": True}
    ours |= hf_fields.activation(fields, "hidden_act", "gelu")
    ours |= {"token_types": fields.get("type_vocab_size", int, 2), "first_position": first}
    return checked(fields, ours | hf_fields.learned_positions(), _SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json; of what counts positions from behind a padding id, RoBERTa's."""
    first = config.get("first_position", 0)
    padded: Config = {"architectures": ["RobertaModel"], "model_type": "roberta", "pad_token_id": first - 1}
    return {
        **(padded if first else {"architectures": ["BertModel"], "model_type": "bert"}),
        **{theirs: config[ours] for theirs, ours in REQUIRED.items()},
        "max_position_embeddings": config["max_position"] + first,
        "type_vocab_size": config.get("token_types", 2),
        "layer_norm_eps": config["norm_eps"],
        "hidden_act": hf_fields.activation_to_hf(config),
    }
