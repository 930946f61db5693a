"""What a text's vector is made of, as GGUF files and those that sentence-transformers writes beside the weights say."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.common.files import read_regular
from roofline.common.json_files import MAX_JSON_BYTES, parse_json, read_config_json

if TYPE_CHECKING:
    from roofline.weights.checkpoint import Checkpoint

VectorKind = Literal["last", "mean", "first"]  # of a text's hidden rows: which one, or the mean of all
KINDS: tuple[VectorKind, ...] = get_args(VectorKind)
_MODULES = ("Transformer", "Pooling", "Normalize")  # all vectors are scaled to length 1
_MODES: dict[str, VectorKind] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_GGUF: dict[int, VectorKind | None] = {0: None, 1: "mean", 2: "first", 3: "last"}  # by pooling_type


def recommended_kind(checkpoint: "Checkpoint") -> VectorKind:
    """Return the kind that the model's files say; where they say nothing the mean of an encoder's rows, and the last
    row of another model.

    Raises UnsupportedError, with file and value, for vectors of an encoder that we do not make.
    """
    from roofline.models.registry import config_of

    encoder = config_of(checkpoint.config).encoder
    try:
        kind = _of_gguf(checkpoint) if checkpoint.kind == "gguf" else _of_folder(checkpoint.path)
    except UnsupportedError:
        if encoder:
            raise
        kind = None  # what generates is served all the same
    return kind or ("mean" if encoder else "last")


def _of_gguf(checkpoint: "Checkpoint") -> VectorKind | None:
    """None: the file does not say."""
    fields = Fields(checkpoint.path, checkpoint.metadata)
    key = f"{fields.need('general.architecture', str)}.pooling_type"
    number = fields.get(key, int, 0)
    if number not in _GGUF:
        reason = "a vector is made in another way, and we do not have this one"
        raise UnsupportedError(f"{checkpoint.path}: {key} = {number}", reason, tuple(map(str, _GGUF)))
    return _GGUF[number]


def _of_folder(path: Path) -> VectorKind | None:
    """None: there is nothing of sentence-transformers."""
    folder = path if path.is_dir() else path.parent
    modules, file = folder / "modules.json", folder / "1_Pooling" / "config.json"
    if modules.is_file():
        _check_modules(modules)
    if not file.is_file():
        return None
    fields = Fields(file, read_config_json(file))
    chosen = [key for key in fields.values if key.startswith("pooling_mode_") and fields.get(key, bool)]
    if len(chosen) == 1 and chosen[0] in _MODES:
        return _MODES[chosen[0]]
    what = f"{file}: {', '.join(map(shorten, chosen)) or 'no pooling_mode that is true'}"
    raise UnsupportedError(what, "a vector is made in one way, and we do not have this one", tuple(_MODES))


def _check_modules(file: Path) -> None:
    """Raises UnsupportedError for a module that changes vectors in a way that we do not have."""
    listed = parse_json(file, "file", read_regular(file, MAX_JSON_BYTES))
    for entry in listed if isinstance(listed, list) else ():
        kind = str(entry.get("type")) if isinstance(entry, dict) else str(entry)
        if kind.rpartition(".")[2] not in _MODULES:
            reason = "it changes the vectors and we do not have it"
            raise UnsupportedError(f"{file}: module {shorten(kind)}", reason, _MODULES)
