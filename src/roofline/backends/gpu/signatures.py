"""What it takes to compile a kernel without a GPU: types instead of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roofline.backends.gpu.tiles import Tile

# Our names of dtypes -> Triton's, for pointers in a signature ("*bf16") and scalars.
TRITON_TYPES = {
    "f32": "fp32", "bf16": "bf16", "f16": "fp16", "e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8",
    "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u8": "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Compilation:
    """One binary of one kernel.

    kernel: its name in tables of tiles, gates and limits; case: what distinguishes this binary ("head_dim=128 decode");
    function: the jitted function; signature: parameter -> Triton type ("*bf16", "fp32"), to which every parameter that
    is no constant is added as "i32" where it is not named; constants: constexpr parameter -> value, to which the tile's
    sizes are added; tile: warps, stages and options; dots: whether matrix instructions must be in it; aligned:
    parameters that are multiples of 16 (all pointers are); large: tensors whose storage may pass 2 GiB (caches), which
    AMD's compiler addresses in another way.
    """

    kernel: str
    case: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    tile: Tile
    dots: bool = False
    aligned: tuple[str, ...] = ()
    large: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = getattr(self.function, "arg_names", ())
        constants = {name: size for name, size in self.tile.sizes.items() if name in names} | dict(self.constants)
        numbers = dict.fromkeys((name for name in names if name not in constants), "i32")
        object.__setattr__(self, "constants", constants)
        object.__setattr__(self, "signature", numbers | dict(self.signature))


def pointers(**dtypes: str) -> dict[str, str]:
    """Signature entries of tensors: parameter -> "*bf16" from parameter="bf16"."""
    return {name: f"*{TRITON_TYPES[dtype]}" for name, dtype in dtypes.items()}
