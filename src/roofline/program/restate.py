"""The tensors of a model as if its matrices were in another format: what a file of it would hold."""

from dataclasses import dataclass

from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.models.mixes import format_in_blocks, formats_of
from roofline.ops import formats
from roofline.program.trace import Tensors

# Names for formats of a whole file -> of its matrices, where the two differ. Q4_K_M is a mixture, see `models.mixes`.
ALIASES = {"FP32": "F32", "FP16": "F16", "FP8": "E4M3", "INT8": "Q8_0", "Q8": "Q8_0", "Q4": "Q4_0"}
MIXTURE = "Q4_K_M"


@dataclass(frozen=True)
class Restated:
    """A tensor that no file holds."""

    format: str
    shape: tuple[int, ...]


def format_named(name: str) -> str:
    """The name of a format in our spelling: "bf16" -> "BF16", "fp8" -> "E4M3", "q4_k_m" -> "Q4_K_M".

    Raises ConfigError with the nearest name for an unknown one.
    """
    extensions.load()
    names = {known.upper(): known for known in (*formats.FORMATS, MIXTURE)}
    upper = name.upper()
    if ALIASES.get(upper, upper) not in names:
        raise ConfigError(unknown("weight format", name, (*names.values(), *map(str.lower, ALIASES))))
    return names[ALIASES.get(upper, upper)]


def restate(tensors: Tensors, form: str) -> dict[str, Restated]:
    """The tensors with all matrices in a format (as `format_named` returns it), vectors beside blocks in F32.

    Raises ConfigError where rows are no whole number of its blocks, but for matrices that are small in any model.
    """
    mixture = formats_of(MIXTURE, {name: info.shape for name, info in tensors.items()}) if form == MIXTURE else {}
    restated = {}
    for name, info in tensors.items():
        format_name = mixture[name] if form == MIXTURE else format_in_blocks(form, name, info.shape)
        formats.get(format_name).nbytes(info.shape)  # raises where blocks would span rows
        restated[name] = Restated(format_name, info.shape)
    return restated


def nbytes(tensors: Tensors) -> int:
    """Bytes that all the tensors take. Raises ConfigError where rows are no whole number of blocks."""
    return sum(formats.get(info.format).nbytes(info.shape) for info in tensors.values())
