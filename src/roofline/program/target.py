"""What a backend's arithmetic is, as data: `legalize` reads it, and nothing else asks which target it is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roofline.common.errors import ConfigError
from roofline.common.names import unknown


@dataclass(frozen=True)
class Target:
    """Numeric choices of a backend.

    quantised_order: the order of linears on quantised weights, whose activations become 8-bit rows; None: weights are
    dequantised instead. logits_order: the same for the linear that makes the logits. float_order: of linears on float
    weights, widened exactly to float32.
    orders: op -> order of the other ops. attend_dtypes: what the cache, q and the softmax weights are rounded to.
    layouts: of weight matrices and of vectors. activations: the dtype that rows are rounded to on their way to and from
    linears; the residual stream is not. rows8: the 8-bit floats that these rows are rounded to, a scale each, where the
    weights are 8-bit floats; "": not. fusions: what `fuse` may make.
    """

    name: str
    quantised_order: str | None
    logits_order: str | None
    float_order: str
    orders: Mapping[str, str]
    attend_dtypes: Mapping[str, str]
    matrix_layout: str
    vector_layout: str
    activations: str = "f32"
    rows8: str = ""
    fusions: tuple[str, ...] = (
        "qk_norm",
        "linear_silu_mul",
        "expert_linear_silu_mul",
        "quantize",
        "linear_add",
        "rope_kv_write",
        "qkv_write",
        "rope_queries",
        "rope_latent_write",
        "cut_heads",
    )


# The orders themselves are written out in docs/explanation/exactness.md and, as code, in backends/reference/orders.py
# and state_orders.py.
CPU = Target(
    name="cpu",
    quantised_order="q8g32",
    logits_order="q15g32",
    float_order="f32",
    orders={
        **dict.fromkeys(("rms_norm", "layer_norm", "like_norm", "above_spread"), "lanes16"),
        **dict.fromkeys(("silu", "silu_mul", "gelu", "gelu_mul", "clamped_swiglu", "soft_cap"), "exp2"),
        **dict.fromkeys(("route", "sigmoid_scale", "sigmoid_mul"), "exp2"),
        "causal_conv": "taps",
        **dict.fromkeys(("delta_rule", "selective_scan"), "tokens"),
        "attend": "pages64",
        "all_reduce": "rank",
    },
    attend_dtypes={"kv_dtype": "bf16", "q_dtype": "bf16", "p_dtype": "bf16"},
    matrix_layout="packed",
    vector_layout="f32",
)
# float32 throughout, each op as its reference computes it: what the families' own text says, and nobody's hardware.
PLAIN = Target(
    name="plain",
    quantised_order=None,
    logits_order=None,
    float_order="",
    orders={"all_reduce": "rank"},
    attend_dtypes={},
    matrix_layout="file",
    vector_layout="file",
)
GPU = Target(
    name="gpu",
    quantised_order=None,
    logits_order=None,
    float_order="any",
    orders={"attend": "any"},
    attend_dtypes={"kv_dtype": "bf16", "q_dtype": "bf16", "p_dtype": "bf16"},
    matrix_layout="device",
    vector_layout="f32",
    activations="bf16",
    fusions=("linear_silu_mul", "rope_kv_write", "qkv_write", "rope_queries", "rope_latent_write", "add_norm"),
)
_TARGETS = {CPU.name: CPU, PLAIN.name: PLAIN, GPU.name: GPU}
# Of a matrix layout: formats of files -> the format that stands in for it in memory, where kernels read another one. On
# a GPU INT4's codes less their zero points are 8-bit integers, and so are the values of tables.
STAND_INS: Mapping[str, Mapping[str, str]] = {
    "device": {"INT4": "Q8_0", "INT8": "Q8_0", "Q5_0": "Q8_0", "IQ4_NL": "Q8_0", "MXFP4": "Q8_0"}
}
GPU_ORDERS = ("any", "tile", "splits256")
# Formats of the KV cache -> the order of attention over it. "bf16" is what CPU says.
CACHE_ORDERS = {"bf16": "pages64", "int8": "pages64.int8"}


def with_cache(target: Target, kv_dtype: str) -> Target:
    """The target with its KV cache in another format. Raises ConfigError on a format there is not."""
    if kv_dtype not in CACHE_ORDERS:
        raise ConfigError(f"there is no KV cache of {kv_dtype!r}; choose one of {', '.join(CACHE_ORDERS)}")
    dtypes = {**target.attend_dtypes, "kv_dtype": kv_dtype}
    return replace(target, orders={**target.orders, "attend": CACHE_ORDERS[kv_dtype]}, attend_dtypes=dtypes)


def gpu(activations: str = "bf16", exact: bool = False, cache: str = "", rows8: str = "") -> Target:
    """GPU with activations in "bf16" or "f16"; exact: sums whose order no other row of a step changes; cache: the
    format of the KV cache where it is another one, "e4m3fn" or "e4m3fnuz"; rows8: see Target.

    Orders of the GPU: "any" may depend on how many rows a step has; "tile": ascending in tiles that do not; attention's
    "splits256": as "pages64" of the CPU, split at multiples of 256 positions.
    """
    return replace(
        GPU,
        activations=activations,
        rows8=rows8,
        attend_dtypes=dict.fromkeys(GPU.attend_dtypes, activations) | ({"kv_dtype": cache} if cache else {}),
        float_order="tile" if exact else GPU.float_order,
        orders={"attend": "splits256", "all_reduce": "rank"} if exact else GPU.orders,
    )


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
