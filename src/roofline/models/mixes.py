"""The kinds of quantised files: which format each tensor gets in them, as llama.cpp's quantiser chooses.

A name such as Q4_K_M stands for a mix: most matrices in one format, those that lose most by it in a finer one. A width
that is no multiple of a format's block gets the nearest format of 32 weights. What runs on llama.cpp, and what people
compare by that name, is the same choice here, in the files that are written and in what `roofline info` says of a model
in that form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.ops import formats

# For rows that are no multiple of the block.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_PLAIN = ("F32", "F16", "BF16")
_LARGE_LLAMA = (80, 8)  # layers, and queries for each key, of the 70B models, whose v is small and worth more bits
_V, _DOWN = "attn.v.weight", "mlp.down.weight"
_NARROW = (".ssm.dt.weight",)  # rows of a few dozen numbers: the rank of a scan's steps
_EXPERTS = re.compile(r"\.(experts\.(\d+\.)?|shared\.)")  # a matrix of experts gets what that of a plain MLP gets
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
    known = {mix.lower(): mix for mix in MIXES} | SHORT
    plain = name.lower().removeprefix("gguf:")
    if plain not in known:
        spelled = [*SHORT, *MIXES]
        near = did_you_mean(plain.upper(), MIXES) or did_you_mean(plain, SHORT)
        raise ConfigError(f"there is no format {name!r} to write{near} (known: {', '.join(spelled)})")
    return known[plain]


@dataclass(frozen=True)
class _Sizes:
    """What of a model decides about formats, as its tensors say. queries: for each key, of the first layer."""

    layers: int
    tied: bool
    experts: int
    queries: int

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> "_Sizes":
        layers = 1 + max((int(match[1]) for name in shapes if (match := _LAYER.match(name))), default=-1)
        experts = next((shape[0] for name, shape in shapes.items() if name.endswith(".router.weight")), 0)
        q, k = (shapes.get(f"layers.0.attn.{name}.weight", (1,))[0] for name in "qk")
        return _Sizes(layers, "head.weight" not in shapes, experts, q // k)


def formats_of(mix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Canonical name -> format of each parameter in a file of a kind.

    Vectors stay F32, as every reader of such files expects; so do the scores of a router, which are few, and learned
    positions.
    """
    sizes = _Sizes.of(shapes)
    return {name: _format(MIXES[mix], name, shape, sizes) for name, shape in shapes.items()}


def stays_float(name: str) -> bool:
    """Whether a matrix is F32 in every kind of file: scores of a router, the scale of a shared expert, positions, taps
    of a convolution, rates of a scan; of Gemma 3n and 4 what makes inputs of layers, and what is between streams."""
    parts = (".router.", ".altup.", ".laurel.", "stream_in.", "stream_out.", "layer_projection.", "positions.weight")
    small = name.endswith((".shared.scale.weight", ".conv.weight", ".a_log.weight"))
    return small or any(part in name for part in parts)


def format_in_blocks(form: str, name: str, shape: tuple[int, ...]) -> str:
    """The format of a parameter where all matrices are to be in one: of vectors F32 beside a format of blocks; of
    matrices whose rows are no whole blocks what files hold them in, if these are matrices that are small in any model.
    """
    block = formats.get(form).block
    if len(shape) < 2:
        return form if block == 1 else "F32"
    if shape[-1] % block == 0:
        return form
    if stays_float(name):
        return "F32"
    return _fitting(form, shape[-1]) if name.endswith(_NARROW) else form


def _format(mix: Mix, name: str, shape: tuple[int, ...], sizes: _Sizes) -> str:
    if len(shape) < 2 or not name.endswith(".weight") or stays_float(name):
        return "F32"
    if mix.base in _PLAIN:
        return mix.base
    if name == "head.weight" or (name in ("embed.weight", "layer_embed.weight") and sizes.tied):
        return _head(mix, shape[-1])
    return _fitting(_in_layer(mix, name, sizes), shape[-1])


def _head(mix: Mix, width: int) -> str:
    if mix.base == "Q8_0" or width % formats.get(mix.base).block:
        return _fitting("Q8_0", width)
    return _fitting("Q6_K", width)


def _in_layer(mix: Mix, name: str, sizes: _Sizes) -> str:
    match = _LAYER.fullmatch(_EXPERTS.sub(".", name))
    if match is None:
        return mix.base
    layer, part, eighth = int(match[1]), match[2], sizes.layers // 8
    if sizes.experts == 8 and part in ("attn.k.weight", _V):  # so small a part of them that it is worth more bits
        return "Q8_0"
    if sizes.experts == 8 and part == "attn.o.weight" and mix.base == "Q4_K":
        return "Q5_K"
    if part in ("attn.qkv.weight", "linear.qkv.weight"):
        return mix.joined or mix.base
    if part not in (_V, _DOWN):
        return mix.base
    if mix.layers == "spread" and (layer < eighth or layer >= 7 * sizes.layers // 8 or (layer - eighth) % 3 == 2):
        return mix.finer
    if mix.layers == "first" and layer < (4 if part == _V else eighth):
        return mix.finer
    if part == _V and mix.base == "Q4_K" and (sizes.layers, sizes.queries) == _LARGE_LLAMA:
        return "Q5_K"
    return mix.base


def _fitting(form: str, width: int) -> str:
    """The format, or what stands in for it for rows of this width."""
    if width % formats.get(form).block == 0:
        return form
    form = _FALLBACK.get(form, form)
    return "F16" if width % formats.get(form).block else form
