"""The tensors of a GGUF file that is written: each has one parameter of ours, or those of all experts of a layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from roofline.common.errors import ConfigError
from roofline.weights import names
from roofline.weights.families.shared.latent_fields import OF_HEADS
from roofline.weights.families.shared.tensor_names import EXPERT, layer_part, without_expert
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.joined_rows import joined_of

_OF_EXPERTS = ".mlp.experts."
_VECTOR = ".mlp.shared.scale.weight"  # one row: files have it as a vector


@dataclass(frozen=True)
class GgufTensor:
    """info: name, format and shape in the file; parts: the parameters whose bytes follow each other in it."""

    info: TensorInfo
    parts: tuple[str, ...]


def gguf_tensors(config: JsonObject, parameters: Sequence[TensorInfo]) -> list[GgufTensor]:
    """The tensors of a file, in the order of the parameters.

    parameters: canonical names, formats as they are written; the experts of a layer as one parameter each, whose
    tensors lie one below the other in the file, or as one parameter of [experts * rows, columns].

    Raises ConfigError for a parameter that GGUF files have no name for, and for experts in several formats.
    """
    return [_tensor(config, name, group) for name, group in stacked_parts(parameters).items()]


def stacked_parts(parameters: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the parameters that lie in one tensor of a GGUF file, those of experts by their numbers -> by what we call
    that tensor."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in parameters:
        name, _ = without_expert(info.name)
        groups.setdefault(name.replace(f"{EXPERT}.", ""), []).append(info)
    return {
        name: sorted(group, key=lambda info: int(without_expert(info.name)[1] or 0)) for name, group in groups.items()
    }


def _tensor(config: JsonObject, name: str, group: list[TensorInfo]) -> GgufTensor:
    first = group[0]
    if any((info.format, info.shape) != (first.format, first.shape) for info in group):
        raise ConfigError(f"{name}: its experts have several formats or shapes, and a GGUF file has them in one tensor")
    shape = first.shape
    if _OF_EXPERTS in name:
        experts = config["experts"]
        shape = (
            experts,
            shape[0] * len(group) // experts,
            *shape[1:],
        )  # [experts, rows, columns]; biases have no columns
    elif layer_part(name)[1] in files_of(config["family"]).NAMES.gguf_stacked:
        parts = len(joined_of(config)[layer_part(name)[1]])
        shape = (parts, shape[0] // parts, *shape[1:])
    elif name.endswith(OF_HEADS):
        shape = (config["heads"], shape[0] // config["heads"], *shape[1:])
    elif name.endswith(_VECTOR):
        shape = shape[-1:]
    shape = files_of(config["family"]).NAMES.gguf_shapes(dict(config)).get(layer_part(name)[1], shape)
    nbytes = sum(info.nbytes for info in group)
    written = replace(first, name=names.to_gguf(config["family"], name), shape=shape, nbytes=nbytes)
    return GgufTensor(written, tuple(info.name for info in group))
