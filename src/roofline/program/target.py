"""What a backend's arithmetic is, as data: `legalize` reads it, and nothing else asks which target it is."""

from collections.abc import Mapping
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.names import unknown


@dataclass(frozen=True)
class Target:
    """Numeric choices of a backend.

    quantised_order: the order of linears on quantised weights, whose activations become 8-bit rows; None: weights are
    dequantised instead. logits_order: the same for the linear that makes the logits. float_order: of linears on float
    weights, widened exactly to float32.
    orders: op -> order of the other ops. attend_dtypes: what the cache, q and the softmax weights are rounded to.
    layouts: of weight matrices and of vectors.
    """

    name: str
    quantised_order: str | None
    logits_order: str | None
    float_order: str
    orders: Mapping[str, str]
    attend_dtypes: Mapping[str, str]
    matrix_layout: str
    vector_layout: str


# The orders themselves are written out in docs/exactness.md and, as code, in backends/reference/orders.py.
CPU = Target(
    name="cpu",
    quantised_order="q8g32",
    logits_order="q15g32",
    float_order="f32",
    orders={"rms_norm": "lanes16", "silu_mul": "exp2", "attend": "pages64"},
    attend_dtypes={"kv_dtype": "bf16", "q_dtype": "bf16", "p_dtype": "bf16"},
    matrix_layout="packed",
    vector_layout="f32",
)
_TARGETS = {CPU.name: CPU}


def register(target: Target) -> None:
    """Add a target. Raises ConfigError when the name is taken."""
    if target.name in _TARGETS:
        raise ConfigError(f"a target named {target.name!r} is already registered")
    _TARGETS[target.name] = target


def get(name: str) -> Target:
    """The target of that name. Raises ConfigError with the nearest known name."""
    if name not in _TARGETS:
        raise ConfigError(unknown("target", name, _TARGETS))
    return _TARGETS[name]
