"""Compiles a kernel for a chip that is not in this machine, exactly as its first launch there would.

Triton's own launch path does it (`warmup`, which stops before the launch), with the driver of stub_driver.py. So the
binary is the one that a launch uses, and so is its key in the cache.
"""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.backends.gpu.ahead import stub_driver
from roofline.backends.gpu.runtime.step import dtypes
from roofline.backends.gpu.signatures import TRITON_TYPES, Compilation
from roofline.hardware.chips.chips import Chip

if TYPE_CHECKING:
    import torch
    from triton.compiler import CompiledKernel

_LOG = "ptxas.log"  # beside the binary in its folder of the cache


@dataclass(frozen=True)
class Binary:
    """asm: the text of each stage by name ("ttir", "ttgir", "ptx" or "amdgcn"), the binary under "cubin" or "hsaco";
    log: what NVIDIA's assembler said, "" for AMD; local_bytes: shared memory (LDS) of a program; warps: it runs with,
    which warp specialisation makes more; key: of the cache."""

    asm: Mapping[str, Any]
    log: str
    local_bytes: int
    warps: int
    key: str


@dataclass(frozen=True)
class _Pointer:
    """What a launch looks at in a tensor. `large`: more than 2 GiB of storage, which AMD's compiler is told of."""

    dtype: "torch.dtype"
    large: bool

    def data_ptr(self) -> int:
        return 0  # aligned, as all our allocations are

    def ptr_range(self) -> int:
        return 1 << 40 if self.large else 0


def compile_ahead(compilation: Compilation, chip: Chip) -> Binary:
    """Compile it, or take it from Triton's cache. Raises what Triton raises, RuntimeError under TRITON_INTERPRET."""
    import triton

    stub_driver.install(chip)
    compiled, log = _warm_up(compilation)
    stored = Path(next(iter(compiled.metadata_group.values()))).parent / _LOG
    if chip.vendor == "nvidia":
        if not log and not stored.exists():  # compiled by a launch, which keeps no log: once more
            compilation.function.device_caches.clear()
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.always_compile = True
                compiled, log = _warm_up(compilation)
        if log:
            stored.write_text(log, encoding="utf-8")
        log = stored.read_text("utf-8")
    return Binary(compiled.asm, log, compiled.metadata.shared, compiled.metadata.num_warps, compiled.hash)


def _warm_up(compilation: Compilation) -> "tuple[CompiledKernel, str]":
    """The compiled kernel, and what the compiler printed on the way."""
    import triton

    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        options = compilation.tile.compiler()
        compiled = compilation.function.warmup(grid=(1,), **arguments(compilation), **options)
    return compiled, printed.getvalue()


def arguments(compilation: Compilation) -> dict[str, object]:
    """Parameter -> a stand-in that a launch specialises on as it will on the real argument."""
    values = {name: _stand_in(kind, name, compilation) for name, kind in compilation.signature.items()}
    return {**values, **compilation.constants}


def _stand_in(kind: str, name: str, compilation: Compilation) -> object:
    if kind.startswith("*"):
        ours = next(ours for ours, theirs in TRITON_TYPES.items() if theirs == kind[1:])
        return _Pointer(dtypes()[ours], name in compilation.large)
    if kind.startswith("fp"):
        return 0.5
    if kind == "i1":
        return True
    number = 1 << 40 if kind == "i64" else 32
    return number if name in compilation.aligned else number + 3
