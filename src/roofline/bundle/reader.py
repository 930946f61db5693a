"""Opens bundles: cheap checks at every start, all hashes on demand."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.bundle import manifest as names
from roofline.bundle import origins
from roofline.bundle.manifest import BundleError, Manifest, unreadable
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.fields import naming

if TYPE_CHECKING:
    from roofline.backends.cpu.lowered import Identity, Lowered
    from roofline.backends.cpu.truth import Sample
    from roofline.backends.prices import PriceTable
    from roofline.program.ir import Program
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer


def is_bundle(path: Path) -> bool:
    """Whether a path is meant to be a bundle, usable or not."""
    return any(os.path.isfile(path / name) for name in (names.CODE, names.WEIGHTS))


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest and code are read, the rest is where it was."""

    path: Path
    manifest: Manifest
    lowered: "Lowered"
    identity: "Identity"

    def map(self) -> Any:
        """Start mapping the image (see `backends.cpu.memory.map_image`)."""
        from roofline.backends.cpu.memory import map_image

        return map_image(self.path / names.WEIGHTS, self.lowered.nbytes)

    @property
    def prices(self) -> "PriceTable":
        """What the Program's steps cost."""
        from roofline.backends.prices import PriceTable

        return PriceTable(**self.manifest.prices)

    def program(self) -> "Program":
        """The Program as it was compiled. Raises BundleError where the text is that of none."""
        from roofline.program.text import parse_program
        from roofline.program.verify import verify

        try:
            program = verify(parse_program(self._text(names.PROGRAM)))
            if len({group.format for group in program.kv_groups.values()}) != 1:
                raise ConfigError("it has no cache, or caches of several formats")
        except (RooflineError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError) as error:
            reason = f"{names.PROGRAM} is no program: {error}"
            raise BundleError(self.path, reason, _source(self.manifest)) from error
        return program

    def text(self) -> "tuple[Tokenizer, ChatTemplate]":
        """Tokenizer and chat template. Raises ConfigError where the source had none."""
        if names.TOKENIZER not in self.manifest.files:
            why = self.manifest.generation["missing"]
            raise ConfigError(f"{self.path} has no tokenizer, as its source had none: {why}")
        from roofline.text.templates.template import ChatTemplate
        from roofline.text.tokenizers.tokenizer import Tokenizer

        source = self._text(names.TEMPLATE) if names.TEMPLATE in self.manifest.files else None
        tokens = {name: self.manifest.generation[name] for name in ("bos_token", "eos_token", "outline")}
        stored = self.read(names.TOKENIZER)
        with naming(self.path / names.TOKENIZER):
            return Tokenizer.from_bytes(stored), ChatTemplate(source, **tokens)

    def samples(self) -> "list[Sample]":
        """What the kernels are checked against. Raises BundleError where a sample does not fit its files."""
        from roofline.backends.cpu.truth import Sample

        raw, start, samples = self.read(names.TRUTH), 0, []
        for form, tensor, rows, columns, address, size in self.manifest.truth:
            samples.append(
                Sample(
                    format=form,
                    tensor=tensor,
                    rows=rows,
                    columns=columns,
                    address=address,
                    raw=raw[start : start + size],
                )
            )
            start += size
        if start != len(raw) or not all(sample.fits(self.lowered.nbytes) for sample in samples):
            raise BundleError(self.path, f"{names.TRUTH} does not fit {names.WEIGHTS}", _source(self.manifest))
        return samples

    def checked(self, isa: str) -> bool:
        """Whether the kernels of `isa` were checked with this very build on this kind of chip."""
        from roofline import _native
        from roofline.hardware.detect import detect

        facts = self.manifest.checked
        return isa in facts["isas"] and facts["build"] == _native.build_id() and facts["chip"] == detect().chip

    def changed(self, name: str) -> BundleError:
        """The error of a file that has not the hash it was written with."""
        return _changed(self.path, name, self.manifest)

    def _text(self, name: str) -> str:
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise BundleError(self.path, f"{name} is no UTF-8: {error}", _source(self.manifest)) from error

    def read(self, name: str) -> bytes:
        """A whole file, as it was written. Raises BundleError."""
        return _read(self.path, name, self.manifest)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle after checking versions, sizes and the hash of its head. Raises BundleError, with a remedy."""
    from roofline import _native
    from roofline.backends.capacity import stores_of
    from roofline.backends.cpu.lowered import from_bytes

    manifest = names.read(path)
    source = _source(manifest)
    if manifest.target != "cpu":
        raise BundleError(path, f"it was lowered for {manifest.target!r}, this build runs 'cpu'", source)
    for name, entry in manifest.files.items():
        try:
            size = os.stat(path / name).st_size
        except OSError as error:
            raise BundleError(path, f"{name} is missing ({error.strerror})", source) from error
        if size != entry["bytes"]:
            raise BundleError(path, f"{name} has {size:,} bytes instead of {entry['bytes']:,}", source)
    try:
        lowered, identity = from_bytes((path / names.CODE).read_bytes(), _native.versions())
        slot_bytes = lowered.checked.slot_bytes  # refused here, where the bundle can be named
        stores = stores_of(manifest.config)
    except OSError as error:
        raise unreadable(path, names.CODE, error, source) from error
    except ConfigError as error:
        raise BundleError(path, f"{names.CODE}: {error}", source) from error
    if lowered.nbytes != manifest.files[names.WEIGHTS]["bytes"]:
        raise BundleError(path, f"{names.CODE} belongs to another {names.WEIGHTS}", source)
    groups = tuple((kind.layers, kind.kv_heads, kind.head_dim, kind.value_dim) for kind in lowered.groups)
    if stores != (groups, slot_bytes):
        raise BundleError(path, f"{names.MANIFEST} and {names.CODE} are of two models", source)
    # The small files, whoever reads them later; the tokenizer's, of megabytes, is hashed where it is read.
    for name in manifest.files.keys() - {names.WEIGHTS, names.TOKENIZER}:
        _read(path, name, manifest)
    return Bundle(path, manifest, lowered, identity)


def _read(path: Path, name: str, manifest: Manifest) -> bytes:
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise unreadable(path, name, error, _source(manifest)) from error
    if hashlib.sha256(data).hexdigest() != manifest.files[name]["sha256"]:
        raise _changed(path, name, manifest)
    return data


def _changed(path: Path, name: str, manifest: Manifest) -> BundleError:
    return BundleError(path, changed_reason(name), _source(manifest))


def changed_reason(name: str) -> str:
    """What is wrong with a file that has not the hash it was written with."""
    return f"{name} is not as it was written: its hash is wrong"


def verify(path: Path) -> Bundle:
    """Open a bundle and compare the hash of every file. Raises BundleError naming the first that is not as written.

    What was read is dropped from memory again, so that a start can map the weights on huge pages.
    """
    bundle = open_bundle(path)
    for name, entry in bundle.manifest.files.items():
        digest = hashlib.sha256()
        with (path / name).open("rb", buffering=0) as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if digest.hexdigest() != entry["sha256"]:
            raise _changed(path, name, bundle.manifest)
    return bundle


def _source(manifest: Manifest) -> str | None:
    return origins.source_of(manifest.id)
