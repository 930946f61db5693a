"""manifest.json: what a bundle is, what it was made from, and what its files must be (docs/reference/bundle.md)."""

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roofline.bundle.recommended import FIELDS, is_possible
from roofline.common.errors import ConfigError
from roofline.common.fields import has_type
from roofline.common.files import cause_of, read_regular
from roofline.common.json_types import JsonMapping
from roofline.program.passes.price import ADMITTED, NAMES
from roofline.weights.vectors import KINDS

FORMAT = 3  # of the directory and this file; libroofline's is in native/library/bundle.cpp
MANIFEST, CODE, WEIGHTS, PROGRAM, TRUTH = "manifest.json", "code.bin", "weights.bin", "program.txt", "truth.bin"
TOKENIZER, TEMPLATE = "tokenizer.bin", "template.jinja"
MAX_MANIFEST = 64 << 20  # bytes
_FILES = frozenset({CODE, WEIGHTS, PROGRAM, TRUTH, TOKENIZER, TEMPLATE})
_SIZES = ("layers", "kv_heads", "head_dim", "max_position")  # of the configuration that a start reads
# What the fields must be: a type, a list of some, a tuple of just these, names with values, {str: values of one kind}.
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("name", "made_by", "target", "weights_hash", "id"), str),
    **dict.fromkeys(("format", "layout", "code"), int),
    "files": {str: {"bytes": int, "sha256": str}},
    "source": {"kind": str},
    "config": {**dict.fromkeys(_SIZES, int), "family": str},
    "tensors": {str: (str, [int])},
    "prices": {
        "windows": [int],
        "counts": [int],
        "rates": [(str, int)],
        **{name: [[int]] for name in ("flops", "weights", "kv")},
    },
    "truth": [(str, str, int, int, int, int)],
    "checked": {"build": str, "chip": str, "isas": [str]},
    "generation": {},
}
_USED_UP = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
_OTHER_PARTS = {"kind": str, "modules": [str], "tensors": int, "nbytes": int, "media": {str: str}}
_WORDS = {"bos_token": str, "eos_token": str}  # of `generation`, where there is a tokenizer


class BundleError(ConfigError):
    """A bundle that cannot be used. `reason` is the cause alone."""

    def __init__(self, path: Path, reason: str, source: str | None = None) -> None:
        self.path, self.reason = path, reason
        remedy = f"Compile it again: roofline compile {source or 'MODEL'} -o {path}"
        super().__init__(f"{path} is a bundle that cannot be used: {reason}. {remedy}")


def unreadable(path: Path, name: str, error: OSError, source: str | None = None) -> ConfigError:
    """The error for a file of a bundle that cannot be read; what this process has used up is no fault of the bundle."""
    if error.errno in _USED_UP:
        return ConfigError(f"{path / name}: cannot be read: {cause_of(error)}")
    return BundleError(path, f"{name} cannot be read ({error.strerror})", source)


class PlaceError(ConfigError):
    """The place of a bundle cannot be written."""


@dataclass(frozen=True)
class BundledTensor:
    """What a bundle was packed from: a name of `ops.formats`, and (rows, cols), or (cols,) of a vector."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest. Sizes in bytes, hashes SHA-256 in hex.

    Attributes:
        layout, code: versions of the packed layout and the operations.
        files: name -> {"bytes", "sha256"}.
        name: the model's, of its files (`model_name`), whatever the files are called.
        source: {"kind", "licence"} of what it was made from; licence: as the files say (`weights.licence`), or empty.
            Where the files were is remembered apart from the bundle (`bundle.origins`).
        config: the model's configuration.
        tensors: name -> [format, shape] of the source.
        prices: fields of `backends.prices.PriceTable`.
        truth: [format, tensor, rows, columns, place in weights.bin, bytes in truth.bin] a sample, in its order.
        checked: {"build", "chip", "isas"} for which the kernels were checked.
        generation: {"bos_id", "eos_ids", "add_bos", "bos_token", "eos_token", "outline"}, or {"missing": why no
            tokenizer}; outline: the chat template as plain data (`text.templates`), null where it is not so simple.
            With either, "sampling" and "pooling": what the source's files recommend; and "other_parts", fields of
            `weights.parts_beside.PartsBeside`, of the text part of a model that reads more.
        id: of all the above.
    """

    name: str
    made_by: str
    target: str
    format: int
    layout: int
    code: int
    files: Mapping[str, JsonMapping]
    source: Mapping[str, str]
    config: JsonMapping
    tensors: Mapping[str, list[Any]]
    weights_hash: str
    prices: JsonMapping
    truth: list[list[Any]]
    checked: JsonMapping
    generation: JsonMapping = field(default_factory=dict)
    id: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def tensor_infos(self) -> "dict[str, BundledTensor]":
        """The source's tensors, as a Program is traced from them."""
        return {name: BundledTensor(form, tuple(shape)) for name, (form, shape) in self.tensors.items()}

    def to_json(self) -> str:
        """The text of the file; `id` is computed."""
        values = asdict(self) | {"id": ""}
        values["id"] = _digest(values)
        return json.dumps(values, indent=1) + "\n"


def read(path: Path) -> Manifest:
    """The manifest of a bundle's directory. Raises BundleError: missing, damaged, or of another format."""
    try:
        if not (path / MANIFEST).exists():
            raise BundleError(path, f"{MANIFEST} is missing")
        values = json.loads(read_regular(path / MANIFEST, MAX_MANIFEST))
        form = values.get("format")
        if form != FORMAT:
            raise BundleError(path, f"it has format {form}, this build reads format {FORMAT}")
        if values["id"] != _digest(values | {"id": ""}):
            raise BundleError(path, f"{MANIFEST} was changed or is damaged")
        if problem := _problem(values):
            raise BundleError(path, f"{MANIFEST} cannot be read ({problem})")
        return Manifest(**values)
    except BundleError:
        raise
    except (
        ConfigError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _USED_UP:
            raise unreadable(path, MANIFEST, error.__cause__) from error
        raise BundleError(path, f"{MANIFEST} cannot be read ({error})") from error


def _problem(values: JsonMapping) -> str | None:
    """What cannot be: whoever wrote the manifest could give it a right `id`."""
    for name, shape in _SHAPE.items():
        if not _fits(values.get(name), shape):
            return f"{name} is not what it should be"
    files, prices, generation = values["files"], values["prices"], values["generation"]
    if not {CODE, WEIGHTS, PROGRAM, TRUTH} <= files.keys() <= _FILES:
        return "files are missing, or others than those of a bundle"
    if len({len(prices[name]) for name in ("counts", "rates", "flops", "weights", "kv")}) != 1:
        return "prices have columns of several lengths"
    if not all((roof in NAMES or roof in ADMITTED) and divisor > 0 for roof, divisor in prices["rates"]):
        return "prices name a roof that is not there"
    columns, windows = 3 + 2 * len(prices["windows"]), prices["windows"]
    if not windows or min(windows) < 0:
        return "prices have no windows, or a negative one"
    if any(len(row) != columns for name in ("flops", "weights", "kv") for row in prices[name]):
        return "prices have rows of another length than their windows ask for"
    if not _fits_experts(prices):
        return "prices of experts are not what they should be"
    config = values["config"]
    heads = config["kv_heads"], config["head_dim"]
    if min(config["layers"], config["max_position"]) < 1 or (
        min(heads) < 1 and heads != (0, 0)
    ):  # (0, 0): no layer attends
        return "config has a size below 1"
    words = TOKENIZER in files
    if not _fits(generation, _WORDS if words else {"missing": str}) or (words and not _fits_outline(generation)):
        return "generation is not what it should be"
    if "other_parts" in generation and not _fits(generation["other_parts"], _OTHER_PARTS):
        return "generation has other_parts that are none"
    sampling = generation.get("sampling", {})
    if generation.get("pooling", "last") not in KINDS:
        return "generation has a pooling that is none"
    if not _fits(sampling, {str: float}) or not sampling.keys() <= FIELDS:
        return "generation has a sampling that is none"
    if impossible := [name for name, value in sampling.items() if not is_possible(name, value)]:
        return f"generation has a {impossible[0]} that sampling cannot have"
    return None


def _fits_experts(prices: JsonMapping) -> bool:
    """Whether the prices of experts, where a model has some, go with the others."""
    if not prices.keys() & {"mixture", "experts"}:
        return True
    if not _fits(prices, {"mixture": (int, int), "experts": [(int, int)]}):
        return False
    experts, top = prices["mixture"]
    return 1 <= top <= experts and len(prices["experts"]) == len(prices["counts"])


def _fits(value: object, shape: Any) -> bool:
    """Whether a value of JSON is what `_SHAPE` says; mappings may hold more than the names that are asked for."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if str in shape:
            return all(_fits(inner, shape[str]) for inner in value.values())
        return all(name in value and _fits(value[name], inner) for name, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(inner, shape[0]) for inner in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape))
    return has_type(value, shape) and (not isinstance(value, int) or -(1 << 63) <= value < 1 << 63)


def _fits_outline(generation: JsonMapping) -> bool:
    """Whether the outline is none, or a list in which loops are not nested: those would multiply."""

    def loops(node: object) -> int:
        inner = max(map(loops, node), default=0) if isinstance(node, list) else 0
        return inner + (isinstance(node, list) and node[:1] == ["for"])

    outline = generation.get("outline")
    fits = outline is None or (isinstance(outline, list) and loops(outline) <= 1)
    return "outline" in generation and fits


def _digest(values: JsonMapping) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
