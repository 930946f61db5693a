"""manifest.json: what a bundle is, what it was made from, and what its files must be (docs/reference/bundle.md)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping

FORMAT = 2  # of the directory and this file; libroofline's is in native/library/bundle.cpp
MANIFEST, CODE, WEIGHTS, PROGRAM, TRUTH = "manifest.json", "code.bin", "weights.bin", "program.txt", "truth.bin"
TOKENIZER, TEMPLATE = "tokenizer.bin", "template.jinja"
MAX_MANIFEST = 64 << 20  # bytes


class BundleError(ConfigError):
    """A bundle that cannot be used. `reason` is the cause alone."""

    def __init__(self, path: Path, reason: str, source: str | None = None) -> None:
        self.path, self.reason = path, reason
        remedy = f"Compile it again: roofline compile {source or 'MODEL'} -o {path}"
        super().__init__(f"{path} is a bundle that cannot be used: {reason}. {remedy}")


class PlaceError(ConfigError):
    """The place of a bundle cannot be written."""


@dataclass(frozen=True)
class Manifest:
    """The manifest. Sizes in bytes, hashes SHA-256 in hex.

    Attributes:
        layout, code: versions of the packed layout and the operations.
        files: name -> {"bytes", "sha256"}.
        source: {"path", "kind", "key"}: what it was made from; `key` identifies path, size, time and first bytes.
        config: the model's configuration.
        tensors: name -> [format, shape] of the source.
        prices: fields of `backends.prices.PriceTable`.
        truth: [format, tensor, rows, columns, place in weights.bin, bytes in truth.bin] a sample, in its order.
        checked: {"build", "chip", "isas"} for which the kernels were checked.
        generation: {"bos_id", "eos_ids", "add_bos", "bos_token", "eos_token", "outline"}, or {"missing": why no
            tokenizer}; outline: the chat template as plain data (`text.templates`), null where it is not so simple.
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

    def to_json(self) -> str:
        """The text of the file; `id` is computed."""
        values = asdict(self) | {"id": ""}
        values["id"] = _digest(values)
        return json.dumps(values, indent=1) + "\n"


def read(path: Path) -> Manifest:
    """The manifest of a bundle's directory. Raises BundleError: missing, damaged, or of another format."""
    try:
        with (path / MANIFEST).open("rb") as file:
            values = json.loads(file.read(MAX_MANIFEST))
        form = values.get("format")
        if form != FORMAT:
            raise BundleError(path, f"it has format {form}, this build reads format {FORMAT}")
        if values["id"] != _digest(values | {"id": ""}):
            raise BundleError(path, f"{MANIFEST} was changed or is damaged")
        return Manifest(**values)
    except FileNotFoundError as error:
        raise BundleError(path, f"{MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(path, f"{MANIFEST} cannot be read ({error})") from error


def _digest(values: JsonMapping) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
