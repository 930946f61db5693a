"""silu and gelu, plain or times a second operand, a sigmoid or a plain value times one, relu and its square, and the
clamped SwiGLU of gpt-oss; float32 between one rounding in and one out."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "gated"
GATES = ("silu", "gelu_tanh", "gelu_erf")  # times a second operand, or alone
FACTORS = ("sigmoid", "plain")  # times a second operand: no op has them alone
RELUS = ("relu", "relu_squared")  # alone: no op multiplies them
CLAMPED = "clamped_swiglu"


@triton.jit
def _gated(
    gate, up, out, width, gate_stride, up_stride, out_stride, limit,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_UP:
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "plain":
        y = x
    elif KIND == "relu":
        y = tl.where(x < 0, 0.0, x)  # a NaN stays one
    elif KIND == "relu_squared":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    elif KIND == "clamped_swiglu":
        x = tl.where(x > limit, limit, x)
        y = x / (1.0 + tl.exp(-1.702 * x))
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + 1.0
    elif KIND == "gelu_tanh":  # (1 + tanh u) / 2 is 1 / (1 + exp(-2u)), which cancels nothing where u is negative
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if HAS_UP:
        y *= u
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


def gated(chip: Chip, kind: str, gate: Tensor, up: Tensor | None = None, *, out: Tensor) -> None:
    """out = act(gate) * up, all [rows, ffn] of any float dtype, rows may lie apart. The ops silu_mul, gelu_mul,
    sigmoid_mul and mul.

    kind: one of GATES or FACTORS. up None: gate [rows, 2 * ffn] holds both side by side. out may be gate or up where
    the dtypes agree.
    """
    assert kind in (*GATES, *FACTORS), kind
    ffn = out.shape[1]
    if up is None:
        gate, up = gate[:, :ffn], gate[:, ffn:]
    _launch(chip, kind, gate, up, out)


def activated(chip: Chip, kind: str, x: Tensor, *, out: Tensor) -> None:
    """out = act(x), both [rows, width] of any float dtype, rows may lie apart. The ops silu, gelu and relu."""
    assert kind in (*GATES, *RELUS), kind
    _launch(chip, kind, x, None, out)


def clamped_swiglu(chip: Chip, gate: Tensor, up: Tensor, limit: float, *, out: Tensor) -> None:
    """out = the op clamped_swiglu of gate and up, all [rows, ffn] as for `gated`."""
    _launch(chip, CLAMPED, gate, up, out, limit)


def _launch(chip: Chip, kind: str, gate: Tensor, up: Tensor | None, out: Tensor, limit: float = 0.0) -> None:
    assert gate.stride(1) == out.stride(1) == 1, "a row lies apart"
    rows, width = out.shape
    tile = tiles.choose(NAME, chip)
    second = gate if up is None else up
    _gated[(rows, cdiv(width, tile.sizes["BLOCK"]))](
        gate, second, out, width, gate.stride(0), second.stride(0), out.stride(0), limit,
        KIND=kind, HAS_UP=up is not None, **tile.launch(),
    )  # fmt: skip


def cost(rows: int, width: int, with_up: bool, in_bytes: int = 2, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch; width: of the result."""
    return rows * width * (9 if with_up else 8), rows * width * (in_bytes * (1 + with_up) + out_bytes)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Each gate times a second operand, and alone, the factors, relu, its square and the clamped SwiGLU in bf16;
    silu_mul of float32 too."""
    tile = tiles.choose(NAME, chip)
    cases = [(kind, with_up, "bf16") for kind in GATES for with_up in (True, False)]
    cases += [(kind, True, "bf16") for kind in FACTORS]
    cases += [*((kind, False, "bf16") for kind in RELUS), (CLAMPED, True, "bf16")]
    aligned = ("width", "gate_stride", "up_stride", "out_stride")
    for kind, with_up, dtype in [*cases, ("silu", True, "f32")]:
        types = {**pointers(gate=dtype, up=dtype, out="bf16"), "limit": "fp32"}
        constants = {"KIND": kind, "HAS_UP": with_up}
        yield Compilation(
            kernel=NAME,
            case=f"{kind} up={with_up} {dtype}",
            function=_gated,
            signature=types,
            constants=constants,
            tile=tile,
            aligned=aligned,
        )
