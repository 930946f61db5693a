"""What files call the tensors of layers of Mamba-2, and what fields say of such layers.

The first matrix of a layer gives the gate, then x, B and C, then the steps: three parameters of ours.
"""

import math
from collections.abc import Mapping

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared.canonical import Config, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import JoinedRows

NEGATED = ("ssm.a_log",)
PARTED = ("ssm.conv",)
JOINED_GGUF = ("ssm.in",)
# What families call the sizes of Mamba-2's layers that stand beside attention.
HF_SIZES = {
    "scan_heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "states": "mamba_d_state",
    "taps": "mamba_d_conv",
}
PASSED_BY = ("ssm.dt",)  # transformers multiplies with the weight of dt_proj past its module
UNADAPTED = ("ssm.o",)  # PEFT 0.21.2 refuses out_proj of these types, which kernels read without its module
_DEFAULTS = {"taps": 4, "groups": 1}  # of the models' configurations
_MOST = 1 << 20  # of each size
_GGUF_KEYS = {"ssm.conv_kernel": "taps", "ssm.state_size": "states", "ssm.time_step_rank": "scan_heads"}
_GGUF_KEYS |= {"ssm.group_count": "groups", "ssm.inner_size": "inner"}
GGUF_HONOURED = tuple(_GGUF_KEYS)


def names(module: str) -> dict[str, tuple[str, str]]:
    """Ours in a layer -> GGUF's, Hugging Face's. module: what these have before the names of such a layer."""
    apart = {f"ssm.{part}": ("", f"{module}.{part}_proj") for part in ("z", "xbc", "dt")}
    return apart | {
        "ssm.in": ("ssm_in", f"{module}.in_proj"),
        "ssm.conv": ("ssm_conv1d", f"{module}.conv1d"),
        "ssm.norm": ("ssm_norm", f"{module}.norm"),
        "ssm.o": ("ssm_out", f"{module}.out_proj"),
    }


def bare_names(module: str) -> dict[str, tuple[str, str]]:
    """The same of tensors whose names end otherwise."""
    return {
        "ssm.a_log.weight": ("ssm_a", f"{module}.A_log"),
        "ssm.d.weight": ("ssm_d", f"{module}.D"),
        "ssm.dt_bias.weight": ("ssm_dt.bias", f"{module}.dt_bias"),
    }


def joined(config: Config) -> dict[str, JoinedRows]:
    """The rows of our parameters in the first matrix of a layer."""
    inner = config.get("inner", 0)
    if not inner:
        return {}
    channels = inner + 2 * config.get("groups", _DEFAULTS["groups"]) * config["states"]
    parts = {"ssm.z": inner, "ssm.xbc": channels, "ssm.dt": config["scan_heads"]}
    return {"ssm.in": [(name, range(rows)) for name, rows in parts.items()]}


def gguf_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes that GGUF files give vectors of ours."""
    if not config.get("inner", 0):
        return {}
    heads, groups = config["scan_heads"], config.get("groups", 1)
    return {"ssm.a_log": (heads, 1), "ssm.d": (heads, 1), "ssm.norm": (groups, config["inner"] // groups)}


def read_sizes(fields: Fields, keys: Mapping[str, str]) -> Config:
    """Sizes of ours, which the file calls `keys`: ours -> theirs."""
    sizes: Config = {}
    for ours, key in keys.items():
        value = fields.need(key, int)
        if not (2 if ours == "taps" else 1) <= value <= _MOST:
            fields.refuse(key, f"{describe(value)} is not from {2 if ours == 'taps' else 1} to {_MOST}")
        sizes[ours] = value
    return sizes


def sizes_to_hf(config: Config, keys: Mapping[str, str]) -> Config:
    """The inverse of `read_sizes`; taps and groups may be left out of a configuration."""
    return {key: config.get(ours, _DEFAULTS[ours]) if ours in _DEFAULTS else config[ours] for ours, key in keys.items()}


def check_sizes(fields: Fields, config: Config, heads_key: str, groups_key: str) -> None:
    """Raise ConfigError where heads do not divide the channels, or groups the heads."""
    if config["inner"] % config["scan_heads"]:
        fields.refuse(heads_key, f"{config['scan_heads']} does not divide {config['inner']} channels")
    if config["scan_heads"] % config["groups"]:
        fields.refuse(groups_key, f"{config['groups']} does not divide {config['scan_heads']} heads")


def expanded(fields: Fields, key: str, width: int) -> int:
    """The channels of a model of that width whose file says how many times as many they are."""
    times = fields.get(key, float, 2.0)
    channels = int(times * width) if 0 < times <= 1 << 10 else 0
    if not 1 <= channels <= _MOST:
        fields.refuse(key, f"{describe(times)} times a width of {width} are not from 1 to {_MOST} channels")
    return channels


def expansion(config: Config) -> float:
    """The inverse of `expanded`: how many times the width the channels of a scan are."""
    times = config["inner"] / config["width"]
    return int(times) if times.is_integer() else times


def check_head(fields: Fields, config: Config, key: str) -> None:
    """Raise ConfigError where the file says another size of a head than its heads have; "auto" says none."""
    size = fields.values.get(key)
    if size not in (None, "auto") and fields.checked(key, size, int) != config["inner"] // config["scan_heads"]:
        fields.refuse(key, f"{size} times {config['scan_heads']} heads are not {config['inner']} channels")


def hf_scans(fields: Fields, width: int) -> Config:
    """Return what config.json says of Mamba-2's layers beside attention of Granite 4 and Bamba."""
    refuse_biases(fields, "mamba_proj_bias")
    ours = read_sizes(fields, HF_SIZES)
    ours["inner"] = expanded(fields, "mamba_expand", width)
    check_sizes(fields, ours, "mamba_n_heads", "mamba_n_groups")
    check_head(fields, ours, "mamba_d_head")
    ours["conv_bias"] = fields.get("mamba_conv_bias", bool, True)
    return ours | step_bounds(fields, "time_step_limit")


def step_bounds(fields: Fields, key: str) -> Config:
    """The bounds of a step, of a list of two numbers; one that is absent or infinite is none."""
    limits = fields.get(key, list)
    if limits is None:
        return {}
    if len(limits) != 2:
        fields.refuse(key, f"has {len(limits)} values, not the least and the greatest step")
    bounds: Config = {}
    least = 0.0 if limits[0] is None else fields.checked(f"{key}[0]", limits[0], float)
    if least < 0:
        fields.refuse(f"{key}[0]", f"{describe(least)} is below 0")
    bounds |= {"least_step": least} if least else {}
    if limits[1] not in (None, math.inf):
        most = fields.checked(f"{key}[1]", limits[1], float)
        if most < least:
            fields.refuse(f"{key}[1]", f"{describe(most)} is below {least}")
        bounds["most_step"] = most
    return bounds


def step_bounds_to_hf(config: Config, key: str) -> Config:
    """The inverse of `step_bounds`: the field, where there are bounds."""
    least, most = config.get("least_step", 0.0), config.get("most_step")
    return {key: [least, math.inf if most is None else most]} if least or most is not None else {}


def from_gguf(fields: Fields) -> Config:
    """The sizes of GGUF metadata."""
    config = read_sizes(fields, {ours: key for key, ours in _GGUF_KEYS.items()})
    check_sizes(fields, config, "ssm.time_step_rank", "ssm.group_count")
    return config


def gguf_keys(config: Config) -> Config:
    """The inverse of `from_gguf`."""
    return sizes_to_hf(config, {ours: key for key, ours in _GGUF_KEYS.items()})


def unsaid(config: Config) -> dict[str, object]:
    """Return what GGUF files cannot say of such layers, and whether it is there."""
    bounded = config.get("most_step") is not None or config.get("least_step")
    return {"bounds of steps": bounded, "biases of scans": config.get("scan_bias")}


def refuse_biases(fields: Fields, key: str) -> None:
    """Raise UnsupportedError for biases of the first and the last matrix."""
    refuse_unless_neutral(fields, {key: (False,)})
