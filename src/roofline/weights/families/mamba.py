"""Files of Mamba and Falcon Mamba, whose B, C and steps are normed."""

import math

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields, scan_models, scans
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.tensor_names import JoinedRows, TensorNames


def names(module: str) -> dict[str, tuple[str, str]]:
    """Ours in a layer of Mamba -> GGUF's, Hugging Face's. module: what these have before the names of such a layer."""
    apart = {"x": "hidden", "z": "gate", "rank": "rank", "bc": "bc"}
    return {f"ssm.{ours}": ("", f"{module}.{theirs}_proj") for ours, theirs in apart.items()} | {
        "ssm.in": ("ssm_in", f"{module}.in_proj"),
        "ssm.steps_bc": ("ssm_x", f"{module}.x_proj"),
        "ssm.dt": ("ssm_dt", f"{module}.dt_proj"),
        "ssm.conv": ("ssm_conv1d", f"{module}.conv1d"),
        "ssm.o": ("ssm_out", f"{module}.out_proj"),
    }


def joined(config: Config) -> dict[str, JoinedRows]:
    """The rows of our parameters in the matrices of a layer that give several of them."""
    inner = config.get("inner", 0)
    if not inner:
        return {}
    steps_and_bc = [("ssm.rank", range(config["rank"])), ("ssm.bc", range(2 * config["states"]))]
    return {"ssm.in": [("ssm.x", range(inner)), ("ssm.z", range(inner))], "ssm.steps_bc": steps_and_bc}


def bare_names(module: str) -> dict[str, tuple[str, str]]:
    """The same of tensors whose names end otherwise."""
    return scans.bare_names(module) | {"ssm.dt_bias.weight": ("ssm_dt.bias", f"{module}.dt_proj.bias")}


NAMES = TensorNames(
    {"norm": ("attn_norm", "norm")} | names("mixer"),
    top=scan_models.TOP,
    hf_layers="backbone.layers",
    hf_prefix="backbone.",
    hf_also=scan_models.HF_ALSO,
    bare=bare_names("mixer"),
    parted=scans.PARTED,
    joined=joined,
    unadapted=(*scans.UNADAPTED, *scans.PASSED_BY),
    gguf_negated=scans.NEGATED,
    gguf_joined=("ssm.in", "ssm.steps_bc"),
)
_KEYS = {"states": "state_size", "taps": "conv_kernel"}
_DEFAULTS = {"vocab_size": 50_280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "conv_kernel": 4}
_RANK, _NORMED = "ssm.time_step_rank", "ssm.dt_b_c_rms"
_GGUF_KEYS = {"inner": "ssm.inner_size", "states": "ssm.state_size", "taps": "ssm.conv_kernel", "rank": _RANK}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    ours = scan_models.from_hf(fields, "mamba", tied=True)
    ours |= scans.read_sizes(fields, _KEYS) | {"inner": scan_models.channels(fields, ours["width"])}
    ours["rank"] = rank(fields, "time_step_rank", ours["width"])
    if model_type == "falcon_mamba":
        ours |= {"scan_norms": "plain", "scan_eps": fields.get("mixer_rms_eps", float, 1e-6)}
        if ours["scan_eps"] <= 0:
            fields.refuse("mixer_rms_eps", f"{describe(ours['scan_eps'])} is not above 0")
    return ours


def rank(fields: Fields, key: str, width: int) -> int:
    """How many numbers a token's steps are made of; "auto", or nothing: a sixteenth of the width."""
    if fields.values.get(key, "auto") == "auto":
        return math.ceil(width / 16)
    value = fields.need(key, int)
    if not 1 <= value <= 1 << 20:
        fields.refuse(key, f"{describe(value)} is not from 1 to {1 << 20}")
    return value


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    norms = config.get("scan_norms") == "plain"
    kind, name = ("falcon_mamba", "FalconMamba") if norms else ("mamba", "Mamba")
    fields = scan_models.to_hf(config, kind, name)
    fields |= {"time_step_rank": config["rank"], "intermediate_size": config["inner"]}
    return fields | ({"mixer_rms_eps": config["scan_eps"]} if norms else {})


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; the norms of B, C and steps have the epsilon of the others."""
    ours = scan_models.from_gguf(model, "mamba", (*_GGUF_KEYS.values(), _NORMED))
    ours |= scans.read_sizes(model.fields, _GGUF_KEYS)
    if model.fields.get(_NORMED, bool, False):
        ours |= {"scan_norms": "plain", "scan_eps": ours["norm_eps"]}
    return ours


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    norms = config.get("scan_norms") == "plain"
    unsaid = {"convolutions without a bias": not config.get("conv_bias", True)}
    unsaid["scans that are not twice as wide as the model"] = config["inner"] != 2 * config["width"]
    unsaid["another epsilon in the scans' norms"] = norms and config["scan_eps"] != config["norm_eps"]
    gguf_fields.refuse_unsaid(config, unsaid)
    keys = {key: config[ours] for ours, key in _GGUF_KEYS.items()} | {_NORMED: norms}
    return gguf_fields.GgufForm("mamba", "half", scan_models.gguf_keys(config) | keys)
