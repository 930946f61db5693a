"""The canonical configuration of a model, the same whatever file it came from, and the checks of its values.

The mapping has the fields of `models.config.ModelConfig`, or of the family's own `Config`; rope_scaling is None, or a
mapping with Hugging Face's keys and "rope_type" linear | llama3 | yarn. It is plain JSON: what differs between layers
is a list with a value for each.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.ops.rope_tables import NEEDED, OPTIONAL

Config = dict[str, Any]

# Upper bounds far above any model, so that a damaged field is named here and not met as a failed allocation.
_INTEGERS = {
    "width": 1 << 20,
    "ffn": 1 << 22,
    "vocab": 1 << 24,
    "max_position": 1 << 30,
    **dict.fromkeys(("layers", "heads", "kv_heads", "head_dim"), 1 << 14),  # the last may have been derived
}


def checked(fields: Fields, config: Config, spelled: Mapping[str, str], absent: Collection[str] = ()) -> Config:
    """The same mapping, its values within reason.

    spelled: what the file calls those that a reader takes from it, for the ConfigError that names file and key; absent:
    sizes of what the model has not.
    """
    for key in (key for key in _INTEGERS if key not in absent):
        check_integer(fields, spelled.get(key, key), key, config[key])
    for key in ("norm_eps", "rope_theta"):
        config[key] = fields.checked(spelled.get(key, key), config[key], float)
        if config[key] <= 0:
            fields.refuse(spelled.get(key, key), f"{config[key]!r} is not above 0")
    if "kv_heads" not in absent and config["heads"] % config["kv_heads"]:
        reason = f"{config['kv_heads']} does not divide the {config['heads']} heads"
        fields.refuse(spelled.get("kv_heads", "kv_heads"), reason)
    if config.get("positions", "rope") == "rope" and config["head_dim"] % 2:
        fields.refuse(spelled.get("head_dim", "head_dim"), f"{config['head_dim']} is odd; rope turns pairs")
    window, most = config["sliding_window"], _INTEGERS["max_position"]
    key = spelled.get("sliding_window", "sliding_window")
    if window is not None and not 1 <= fields.checked(key, window, int) <= most:
        fields.refuse(key, f"{describe(window)} is not from 1 to {most}")
    return config


def check_integer(fields: Fields, spelled: str, key: str, value: object) -> None:
    """Raise ConfigError unless a canonical field, which the file calls `spelled`, is within reason."""
    if not 1 <= fields.checked(spelled, value, int) <= _INTEGERS[key]:
        fields.refuse(spelled, f"{describe(value)} is not from 1 to {_INTEGERS[key]}")


def with_checked_windows(fields: Fields, keys: Sequence[str], config: Config) -> Config:
    """Return the configuration as it is. Raises ConfigError where a layer's window is beyond reason; keys: what the
    file may call the window, of which the first that it has is named."""
    most = _INTEGERS["max_position"]
    largest = max([config.get("sliding_window") or 0, *(config.get("layer_windows") or ())])
    if largest > most:
        key = next((key for key in keys if fields.values.get(key) is not None), keys[-1])
        fields.refuse(key, f"{describe(fields.values.get(key, largest))} is not from 1 to {most}")
    return config


def refuse_unless_neutral(fields: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise UnsupportedError for the first field with a value that changes the mathematics.

    neutral: fields -> the values at which they change nothing; an absent field and null never do.
    """
    for key, values in neutral.items():
        if fields.values.get(key) is None:
            continue
        value = fields.values[key]
        if values and type(value) not in map(type, values):
            value = fields.checked(key, value, float if type(values[0]) is int else type(values[0]))
        if value not in values:
            what = f"{fields.path}: {fields.within}{key} = {shorten(str(value))}"
            raise UnsupportedError(what, "it changes the mathematics and we do not have it")


def checked_rope_scaling(fields: Fields, kind: str, spelled: Mapping[str, str] | None = None) -> Config | None:
    """The canonical rope scaling of a kind; numbers become floats. Raises ConfigError or UnsupportedError by field.

    spelled: what the file calls Hugging Face's keys, where it has other names.
    """
    if kind in ("default", "none"):
        return None
    if kind not in NEEDED:
        reason = "only scalings fixed at load by the configuration give equal numbers for equal prefixes"
        raise UnsupportedError(f"{fields.path}: rope scaling {shorten(kind)!r}", reason, tuple(NEEDED))
    names = dict(spelled or {})
    scaling: Config = {"rope_type": kind}
    for key in NEEDED[kind]:
        value = fields.positive(names.get(key, key))
        if value is None:
            fields.refuse(names.get(key, key), f"is missing, and rope scaling {kind!r} needs it")
        scaling[key] = value
    for key in OPTIONAL.get(kind, ()):
        name = names.get(key, key)
        if key == "truncate" and name in fields.values:
            scaling[key] = fields.need(name, bool)  # transformers reads null as false, so null is no default here
        elif fields.get(name, float) is not None:
            scaling[key] = fields.positive(name)
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        fields.refuse("high_freq_factor", "is not above low_freq_factor")
    return scaling
