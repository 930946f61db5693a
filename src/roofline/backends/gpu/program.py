"""Which Program a GPU runs: a checkpoint in the arithmetic of GPUs."""

from typing import TYPE_CHECKING

from roofline.backends.options import LoadOptions
from roofline.common.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from roofline.backends.checkpoint import Tensors
    from roofline.hardware.chips.chips import Chip
    from roofline.models.config import ModelConfig
    from roofline.program.ir import Program, Share

FLOAT8 = "E4M3"  # of ops.formats


def compile_for_gpu(
    checkpoint: "Tensors",
    config: "ModelConfig",
    options: LoadOptions,
    chip: "Chip | None" = None,
    share: "Share | None" = None,
) -> "Program":
    """The Program in the arithmetic of GPUs: 16-bit rows, in the format of the file where that is F16.

    chip: that it is for, where the cache or activations are to be fp8. Raises ConfigError for a cache of another
    format, UnsupportedError for weights of a format without kernels, for fp8 on a chip without it, for activations of
    fp8 where no weights are or beside adapters, and for adapters of a rank that the kernel does not have.
    """
    from roofline.models import registry
    from roofline.program import target
    from roofline.program.compile import compile_program
    from roofline.program.ir import WHOLE

    matrices = {info.format for info in checkpoint.tensors.values() if len(info.shape) == 2}
    _check_formats(matrices)
    rows = "f16" if matrices == {"F16"} else "bf16"
    kv_dtype, cache, rows8 = options.kv_cache_dtype, "", ""
    if kv_dtype == "fp8":
        cache = _float8_variant(chip, "an fp8 KV cache", f"kv_cache_dtype={rows}")
    elif kv_dtype not in ("auto", rows):
        raise ConfigError(
            f"the cache of this model on a GPU is {rows} or fp8, not {kv_dtype}: leave kv_cache_dtype out"
        )
    if options.activations == "fp8":
        rows8 = _float8_variant(chip, "activations of fp8", "activations=auto")
        if options.max_adapters:
            reason = "an adapter reads rows of 16 bits"
            raise UnsupportedError("activations of fp8 beside adapters", reason, ("activations=auto",))
        if FLOAT8 not in matrices:
            reason = f"its weights are {', '.join(sorted(matrices))}, and products are of two alike"
            raise UnsupportedError("activations of fp8 for this model", reason, ("activations=auto",))
    gpu_target = target.gpu(rows, options.exact, cache, rows8)
    family, tensors = registry.get(config.family), checkpoint.tensors
    program = compile_program(family, config, tensors, gpu_target, share=share or WHOLE)
    if not options.max_adapters:
        return program
    from roofline.backends.gpu.runtime.adapters import check_rank
    from roofline.program.passes.adapt import adapt

    check_rank(options.max_adapter_rank)
    return adapt(program, options.max_adapter_rank)


def _float8_variant(chip: "Chip | None", what: str, instead: str) -> str:
    """Return which 8-bit floats the chip has (e4m3fn or e4m3fnuz). Raises UnsupportedError where it has none."""
    assert chip is not None, f"{what} need a chip, which decides their format"
    if not chip.fp8:
        raise UnsupportedError(f"{what} on {chip.name}", "its instructions do not convert 8-bit floats", (instead,))
    return chip.fp8


def _check_formats(matrices: "set[str]") -> None:
    """Raises UnsupportedError, naming the file's formats, where the kernels cannot read one."""
    from roofline.backends.gpu.pack import LAYOUTS, STAND_INS
    from roofline.ops import formats
    from roofline.ops.symbol import FLOAT_FORMATS

    readable = {*FLOAT_FORMATS, *LAYOUTS, *STAND_INS, FLOAT8}
    foreign = sorted(name for name in matrices if formats.packed(name).name not in readable)
    if foreign:
        what, reason = f"weights of {', '.join(foreign)} on a GPU", "its kernels do not read them"
        raise UnsupportedError(what, reason, ("the cpu backend", *sorted(readable)))
