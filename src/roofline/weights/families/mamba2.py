"""Files of Mamba-2."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, scan_models, scans
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.tensor_names import TensorNames

NAMES = TensorNames(
    {"norm": ("attn_norm", "norm")} | scans.names("mixer"),
    top=scan_models.TOP,
    hf_layers="backbone.layers",
    hf_prefix="backbone.",
    hf_also=scan_models.HF_ALSO,
    hf_before=("model.",),
    bare=scans.bare_names("mixer"),
    parted=scans.PARTED,
    joined=scans.joined,
    unadapted=scans.UNADAPTED,
    gguf_negated=scans.NEGATED,
    gguf_joined=scans.JOINED_GGUF,
    gguf_shapes=scans.gguf_shapes,
)
_KEYS = {"scan_heads": "num_heads", "states": "state_size", "taps": "conv_kernel", "groups": "n_groups"}
_DEFAULTS = {"num_heads": 128, "head_dim": 64, "vocab_size": 32_768, "hidden_size": 4096, "state_size": 128}
_DEFAULTS |= {"num_hidden_layers": 64, "conv_kernel": 4, "n_groups": 8}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; of time_step_rank, which Mamba has, nothing comes."""
    fields.values.get("time_step_rank")
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    ours = scan_models.from_hf(fields, "mamba2", tied=False)
    ours |= scans.read_sizes(fields, _KEYS) | {"inner": scan_models.channels(fields, ours["width"])}
    scans.check_sizes(fields, ours, "num_heads", "n_groups")
    if fields.need("head_dim", int) * ours["scan_heads"] != ours["inner"]:
        fields.refuse("head_dim", f"times {ours['scan_heads']} heads is not {ours['inner']} channels")
    return ours | scans.step_bounds(fields, "time_step_limit")


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = scan_models.to_hf(config, "mamba2", "Mamba2")
    fields |= {"num_heads": config["scan_heads"], "head_dim": config["inner"] // config["scan_heads"]}
    return fields | {"n_groups": config.get("groups", 1)} | scans.step_bounds_to_hf(config, "time_step_limit")


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    return scan_models.from_gguf(model, "mamba2", scans.GGUF_HONOURED) | scans.from_gguf(model.fields)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    without = not config.get("conv_bias", True)
    gguf_fields.refuse_unsaid(config, {"convolutions without a bias": without, **scans.unsaid(config)})
    return gguf_fields.GgufForm("mamba2", "half", scan_models.gguf_keys(config) | scans.gguf_keys(config))
