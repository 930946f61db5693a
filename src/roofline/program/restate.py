"""The tensors of a model as if its matrices were in another format: what a file of it would hold."""

import re
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.ops import formats
from roofline.program.trace import Tensors

# Names for formats of a whole file -> of its matrices, where the two differ. Q4_K_M is a mixture, see `_q4_k_m`.
ALIASES = {"FP32": "F32", "FP16": "F16", "FP8": "E4M3", "INT8": "Q8_0", "Q8": "Q8_0", "Q4": "Q4_0"}
MIXTURE = "Q4_K_M"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_EIGHT = {"attn.k.weight": "Q8_0", "attn.v.weight": "Q8_0", "attn.o.weight": "Q5_K"}
# K-quants have blocks of 256: what ggml's quantizer takes for rows that are no whole number of them.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Restated:
    """A tensor that no file holds."""

    format: str
    shape: tuple[int, ...]


def format_named(name: str) -> str:
    """The name of a format in our spelling: "bf16" -> "BF16", "fp8" -> "E4M3", "q4_k_m" -> "Q4_K_M".

    Raises ConfigError with the nearest name for an unknown one.
    """
    names = {known.upper(): known for known in (*formats.FORMATS, MIXTURE)}
    upper = name.upper()
    if ALIASES.get(upper, upper) not in names:
        raise ConfigError(unknown("weight format", name, (*names.values(), *map(str.lower, ALIASES))))
    return names[ALIASES.get(upper, upper)]


def restate(tensors: Tensors, form: str) -> dict[str, Restated]:
    """The tensors with all matrices in a format (as `format_named` returns it), vectors beside blocks in F32.

    Raises ConfigError where rows are no whole number of its blocks.
    """
    vector = form if form != MIXTURE and formats.get(form).block == 1 else "F32"
    layers = 1 + max((int(match[1]) for name in tensors if (match := _LAYER.match(name))), default=-1)
    tied = "head.weight" not in tensors
    experts = next((info.shape[0] for name, info in tensors.items() if name.endswith(".router.weight")), 0)
    restated = {}
    for name, info in tensors.items():
        if len(info.shape) == 1:
            own = vector
        else:
            own = form if form != MIXTURE else _q4_k_m(name, info.shape, layers, tied, experts)
        formats.get(own).nbytes(info.shape)  # raises where blocks would span rows
        restated[name] = Restated(own, info.shape)
    return restated


def nbytes(tensors: Tensors) -> int:
    """Bytes that all the tensors take. Raises ConfigError where rows are no whole number of blocks."""
    return sum(formats.get(info.format).nbytes(info.shape) for info in tensors.values())


def _q4_k_m(name: str, shape: tuple[int, ...], layers: int, tied: bool, experts: int) -> str:
    """What ggml's quantizer makes of a matrix in a Q4_K_M file: Q6_K for the head and for half of the matrices v and
    down, those of the first and last eighth of the layers and of every third between. Routers are not quantised, and of
    models with eight experts attention is finer."""
    match = _LAYER.match(name)
    part = _EXPERT.sub(".experts.", match[2]) if match else name
    form = "Q4_K"
    if part.endswith("router.weight"):
        return "F32"
    if part == "head.weight" or (part == "embed.weight" and tied):
        form = "Q6_K"
    elif experts == 8 and part in _OF_EIGHT:
        form = _OF_EIGHT[part]
    elif match is not None:
        layer, eighth = int(match[1]), layers // 8
        finer = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if finer and part in ("attn.v.weight", "mlp.down.weight", "mlp.experts.down.weight", "mlp.shared.down.weight"):
            form = "Q6_K"
        elif part == "attn.qkv.weight" or (part == "attn.v.weight" and layers == 80):  # 70B models have 80
            form = "Q5_K"
    return form if shape[1] % formats.get(form).block == 0 else _NARROW[form]
