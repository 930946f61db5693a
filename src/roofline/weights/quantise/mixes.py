"""The kinds of GGUF files that we write: which format each tensor gets, as llama.cpp's quantiser chooses.

A name such as Q4_K_M stands for a mix: most matrices in one format, those that lose most by it in a finer one. A width
that is no multiple of a format's block gets the nearest format of 32 weights. What runs on llama.cpp, and what people
compare by that name, is the same choice here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.ops import formats
from roofline.weights.files.mapped import JsonObject

# For rows that are no multiple of the block.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_PLAIN = ("F32", "F16", "BF16")
_LARGE_LLAMA = (80, 8)  # layers, and queries for each key, of the 70B models, whose v is small and worth more bits
_V, _DOWN = "attn.v.weight", "mlp.down.weight"
_EXPERTS = re.compile(r"\.experts\.(\d+\.)?")
# Of models of eight experts attention is so small a part that it is worth more bits.
_OF_EIGHT = {"attn.v.weight": "Q8_0", "attn.k.weight": "Q8_0", "attn.o.weight": "Q5_K"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Mix:
    """A kind of file. number: its `general.file_type`; base: format of the matrices; finer: of v and down in some
    layers, by `layers`: "spread" (an eighth at each end and a third between) or "first"; joined: of q, k and v in one
    matrix, the base where it is empty."""

    number: int
    base: str
    finer: str = ""
    layers: str = ""
    joined: str = ""


MIXES = {
    "F32": Mix(0, "F32"),
    "F16": Mix(1, "F16"),
    "BF16": Mix(32, "BF16"),
    "Q4_0": Mix(2, "Q4_0"),
    "Q4_1": Mix(3, "Q4_1"),
    "Q8_0": Mix(7, "Q8_0"),
    "Q5_0": Mix(8, "Q5_0"),
    "Q5_1": Mix(9, "Q5_1"),
    "Q4_K_S": Mix(14, "Q4_K", "Q5_K", "first"),
    "Q4_K_M": Mix(15, "Q4_K", "Q6_K", "spread", "Q5_K"),
    "Q5_K_S": Mix(16, "Q5_K"),
    "Q5_K_M": Mix(17, "Q5_K", "Q6_K", "spread", "Q6_K"),
    "Q6_K": Mix(18, "Q6_K"),
}
SHORT = {"q4": "Q4_K_M", "q5": "Q5_K_M", "q6": "Q6_K", "q8": "Q8_0", "bf16": "BF16", "f16": "F16", "f32": "F32"}


def mix_of(name: str) -> str:
    """The kind of file that a user names: "q4", "gguf:Q4_K_M", "Q4_K_M". Raises ConfigError with the nearest name."""
    known = {each.lower(): each for each in MIXES} | SHORT
    plain = name.lower().removeprefix("gguf:")
    if plain not in known:
        spelled = [*SHORT, *MIXES]
        near = did_you_mean(plain.upper(), MIXES) or did_you_mean(plain, SHORT)
        raise ConfigError(f"there is no format {name!r} to write{near} (known: {', '.join(spelled)})")
    return known[plain]


def formats_of(mix: str, config: JsonObject, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Canonical name -> format of each parameter in a file of a kind.

    Vectors stay F32, as every reader of such files expects; so do the scores of a router, which are few, and learned
    positions.
    """
    return {name: _format(MIXES[mix], name, shape, config) for name, shape in shapes.items()}


def stays_float(name: str) -> bool:
    """Whether a matrix is F32 in every kind of file: scores of a router, the scale of a shared expert, positions."""
    return ".router." in name or name.endswith(".shared.scale.weight") or name == "positions.weight"


def _format(mix: Mix, name: str, shape: tuple[int, ...], config: JsonObject) -> str:
    if len(shape) < 2 or not name.endswith(".weight") or stays_float(name):
        return "F32"
    if mix.base in _PLAIN:
        return mix.base
    if name == "head.weight" or (name == "embed.weight" and config["tied"]):
        return _head(mix, shape[-1])
    return _fitting(_in_layer(mix, name, config), shape[-1])


def _head(mix: Mix, width: int) -> str:
    if mix.base == "Q8_0" or width % formats.get(mix.base).block:
        return _fitting("Q8_0", width)
    return _fitting("Q6_K", width)


def _in_layer(mix: Mix, name: str, config: JsonObject) -> str:
    match = _LAYER.fullmatch(_EXPERTS.sub(".", name))
    if match is not None and match[2] in _OF_EIGHT and config.get("experts") == 8:
        return _OF_EIGHT[match[2]]
    if match is not None and match[2] == "attn.qkv.weight":
        return mix.joined or mix.base
    if match is None or match[2] not in (_V, _DOWN):
        return mix.base
    layer, count = int(match[1]), config["layers"]
    eighth = count // 8
    if mix.layers == "spread" and (layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2):
        return mix.finer
    if mix.layers == "first" and layer < (4 if match[2] == _V else eighth):
        return mix.finer
    queries = config["heads"] // config["kv_heads"]
    if match[2] == _V and mix.base == "Q4_K" and (count, queries) == _LARGE_LLAMA:
        return "Q5_K"
    return mix.base


def _fitting(form: str, width: int) -> str:
    """The format, or what stands in for it for rows of this width."""
    if width % formats.get(form).block == 0:
        return form
    form = _FALLBACK.get(form, form)
    return "F16" if width % formats.get(form).block else form
