"""What readers share of types that tell layers with a window from the others, and may turn q and k otherwise there."""

from collections.abc import Sequence

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config

KINDS = ("full_attention", "sliding_attention")


def window_of_each(config: Config) -> list[int]:
    """The inverse of `hf_fields.windows`."""
    return config.get("layer_windows") or [config["sliding_window"] or 0] * config["layers"]


def kinds_of_layers(each: Sequence[int]) -> list[str]:
    """The layer_types of the windows of all layers."""
    return ["sliding_attention" if window else "full_attention" for window in each]


def ropes_by_kind(fields: Fields, theta: float, local_theta: float) -> Config:
    """rope_theta, rope_scaling and local_theta of types that have a table for each kind of layer in rope_parameters, as
    transformers takes them: rope_scaling goes over what stands there for layers without a window; the thetas given are
    those where a table has none.

    Raises UnsupportedError for what stands there for all layers, for a scaling of those with a window, and for a ramp
    of YaRN that is not cut at whole dimensions, which transformers would cut.
    """
    by_kind, scaling = fields.inside("rope_parameters"), fields.get("rope_scaling", dict) or {}
    flat = sorted(key for key, value in by_kind.values.items() if key not in KINDS and value is not None)
    if flat:
        what = f"{fields.path}: rope_parameters.{shorten(flat[0])} of all kinds of layers"
        raise UnsupportedError(what, f"this type has a table for each of {', '.join(KINDS)} there")
    tables = [by_kind.inside(kind).values or {"rope_type": "default"} for kind in KINDS]
    if "type" in scaling and "rope_type" not in scaling and "rope_type" in tables[0]:
        fields.refuse("rope_scaling.type", "is not read: call it rope_type")
    size = {"max_position_embeddings": fields.need("max_position_embeddings", int)}
    if {**tables[0], **scaling}.get("truncate") not in (None, True):
        what = f"{fields.path}: rope_parameters.full_attention.truncate"
        raise UnsupportedError(
            what, "transformers 5.24 does not read it in a table of one kind of layers; take it away"
        )
    full = {**size, "rope_theta": theta, "rope_parameters": {**tables[0], **scaling}}
    local = {**size, "rope_theta": local_theta, "rope_parameters": tables[1]}
    theta_read, scaling_read = hf_fields.rope(Fields(fields.path, full))
    local_read, local_scaling = hf_fields.rope(Fields(fields.path, local))
    if local_scaling is not None:
        what = f"{fields.path}: rope_parameters.sliding_attention with a scaling"
        raise UnsupportedError(what, "layers with a window are not scaled")
    return {"rope_theta": theta_read, "rope_scaling": scaling_read, "local_theta": local_read}


def nested_ropes(fields: Config, config: Config) -> Config:
    """The inverse of `ropes_by_kind`, on the fields that `hf_fields.to_hf` gives."""
    plain = {key: value for key, value in fields.items() if key not in ("rope_theta", "rope_scaling")}
    local = {"rope_type": "default", "rope_theta": config.get("local_theta") or config["rope_theta"]}
    tables = zip(KINDS, (fields["rope_parameters"], local), strict=True)
    return plain | {"rope_parameters": dict(tables)}
