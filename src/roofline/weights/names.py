"""Names of parameters: from those of GGUF and Hugging Face to those of our models, and back.

Both maps hold for every family we have: a family that lacks a parameter is caught when names are checked.
"""

import re

from roofline.common.errors import ConfigError
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.weights.files.mapped import JsonObject

# Ours in a layer: GGUF's, Hugging Face's.
_LAYER = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "attn.q": ("attn_q", "self_attn.q_proj"),
    "attn.k": ("attn_k", "self_attn.k_proj"),
    "attn.v": ("attn_v", "self_attn.v_proj"),
    "attn.o": ("attn_output", "self_attn.o_proj"),
    "attn.q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "attn.k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "mlp.gate": ("ffn_gate", "mlp.gate_proj"),
    "mlp.up": ("ffn_up", "mlp.up_proj"),
    "mlp.down": ("ffn_down", "mlp.down_proj"),
}
_GGUF_LAYER, _HF_LAYER = ({theirs[at]: ours for ours, theirs in _LAYER.items()} for at in range(2))
_GGUF_TOP = {"token_embd": "embed", "output": "head", "output_norm": "final_norm"}
GGUF_ROPE_FACTORS = "rope_freqs.weight"  # not a parameter: divisors of the rope frequencies
_HF_TOP = {"model.embed_tokens": "embed", "lm_head": "head", "model.norm": "final_norm"}
_MPT_LAYER = {
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn.qkv",
    "attn.out_proj": "attn.o",
    "norm_2": "mlp_norm",
    "ffn.gate": "mlp.gate",
    "ffn.up_proj": "mlp.up",
    "ffn.down_proj": "mlp.down",
}
_MPT_TOP = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    "transformer.norm_f": "final_norm",
    "lm_head": "head",
}
# Buffers that old files of Hugging Face carry and that follow from the configuration.
HF_BUFFERS = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")

_INDEX = r"(0|[1-9][0-9]{0,5})"  # no leading zeros: two spellings of one layer would be two names for one parameter
_GGUF = re.compile(rf"blk\.{_INDEX}\.(\w+)\.(weight|bias)")
_HF = re.compile(rf"model\.layers\.{_INDEX}\.([\w.]+)\.(weight|bias)")
_MPT = re.compile(rf"transformer\.blocks\.{_INDEX}\.([\w.]+)\.(weight|bias)")
_OURS = re.compile(rf"layers\.{_INDEX}\.([\w.]+)\.(weight|bias)")


def from_gguf(name: str) -> str | None:
    """``"blk.3.attn_q.weight"`` -> ``"layers.3.attn.q.weight"``; None for a name that no model of ours has."""
    return _canonical(name, _GGUF, _GGUF_LAYER, _GGUF_TOP)


def from_hf(name: str) -> str | None:
    """``"model.layers.3.self_attn.q_proj.weight"`` -> ``"layers.3.attn.q.weight"``; None for an unknown name."""
    return _canonical(name, _HF, _HF_LAYER, _HF_TOP) or _canonical(name, _MPT, _MPT_LAYER, _MPT_TOP)


def to_hf(family: str, name: str) -> str:
    """What Hugging Face calls a parameter of one of our families: the inverse of `from_hf`. Raises ConfigError."""
    mpt = family == "mpt"
    match = _OURS.fullmatch(name)
    if match:
        index, part, kind = match.groups()
        table, prefix = (_MPT_LAYER, f"transformer.blocks.{index}.") if mpt else (_HF_LAYER, f"model.layers.{index}.")
    else:
        part, _, kind = name.rpartition(".")
        table, prefix = _MPT_TOP if mpt else _HF_TOP, ""
    theirs = next((theirs for theirs, ours in table.items() if ours == part), None)
    if theirs is None:
        raise ConfigError(f"{name} of a {family} model has no name in Hugging Face's files")
    return f"{prefix}{theirs}.{kind}"


def _canonical(name: str, pattern: re.Pattern[str], layer: dict[str, str], top: dict[str, str]) -> str | None:
    match = pattern.fullmatch(name)
    if match:
        index, part, kind = match.groups()
        return f"layers.{index}.{layer[part]}.{kind}" if part in layer else None
    stem, _, kind = name.rpartition(".")
    return f"{top[stem]}.{kind}" if stem in top and kind in ("weight", "bias") else None


def parameter_shapes(config: JsonObject) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter a file must hold for a configuration: the rows of its family's table.

    Raises ConfigError, UnsupportedError for configurations the family does not have.
    """
    family, cfg = configure(config)
    return {param.name: param.shape for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None}
