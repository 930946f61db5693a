"""Writes bundles: everything into a directory of a temporary name, which is renamed when it is whole."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.bundle import manifest as names
from roofline.bundle.manifest import Manifest, PlaceError
from roofline.bundle.reader import is_bundle
from roofline.bundle.recommended import recommended_sampling, warn_of_unused
from roofline.bundle.text_side import load_text
from roofline.common.errors import CapacityError, RooflineError
from roofline.common.fields import naming
from roofline.common.files import cause_of
from roofline.common.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from roofline.backends.cpu.layout import ImageLayout
    from roofline.backends.cpu.truth import Sample
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

MAX_POSITIONS = 32768  # of the rope table; who serves more makes a longer table at load
STALE_SECONDS = 60.0  # a temporary directory this old that nobody holds was left by a killed process


WriteReport = Callable[[int, int], None]  # (bytes that are written, bytes that will be)


@dataclass(frozen=True)
class WrittenBundle:
    """A new bundle: where, its manifest's id, its bytes on disk, and the seconds it took."""

    path: Path
    bundle_id: str
    nbytes: int
    seconds: float


def write_bundle(
    checkpoint: "Checkpoint",
    out: Path,
    *,
    threads: int,
    needs_text: bool = False,
    report: WriteReport | None = None,
) -> WrittenBundle:
    """Compile a checkpoint for the cpu backend into the directory `out`, replacing a bundle that is there.

    Args:
        threads: for packing.
        needs_text: a tokenizer that cannot be read is an error, which is raised before the weights are read.
        report: called with the bytes of weights that are written and those that will be, part by part.

    Raises:
        ConfigError: the place cannot be written, or holds something that is no bundle.
        UnsupportedError, CapacityError, TruthError: as loading the checkpoint.
    """
    start = time.perf_counter()
    from roofline.backends.checkpoint import weights_hash
    from roofline.backends.cpu.layout import lay_out
    from roofline.backends.cpu.lower import keep_operands, lower
    from roofline.backends.cpu.truth import samples
    from roofline.backends.prices import PriceTable
    from roofline.models import registry
    from roofline.program import target
    from roofline.program.compile import compile_program
    from roofline.weights.licence import licence_of

    config = registry.config_of(checkpoint.config)
    with naming(checkpoint.path):
        program = compile_program(registry.get(config.family), config, checkpoint.tensors, target.CPU)
    layout, planned = lay_out(program, min(config.max_position, MAX_POSITIONS)), keep_operands(program)
    lowered = lower(planned, layout)
    with ThreadPoolExecutor(2) as pool, _place(out, layout.nbytes) as part:
        words = pool.submit(_text_files, checkpoint, needs_text)
        checks = samples(program, layout, checkpoint)
        contents, generation = words.result()
        recommended = _recommended(checkpoint)
        identity = pool.submit(weights_hash, checkpoint)  # nothing is refused any more: now all weights are read
        files = {names.WEIGHTS: _write_image(part / names.WEIGHTS, program, layout, checkpoint, threads, report)}
        checked = _check(part / names.WEIGHTS, layout, checks)
        contents |= _program_files(program, lowered, generation, identity.result())
        contents[names.TRUTH] = b"".join(sample.raw for sample in checks)
        files |= {file: _write(part / file, data) for file, data in contents.items()}
        manifest = Manifest(
            **_origin(checkpoint, files, identity.result()),
            name=model_name(checkpoint),
            source={"kind": checkpoint.kind, "licence": licence_of(checkpoint)},
            prices=PriceTable.of(planned).as_json(),
            truth=[[s.format, s.tensor, s.rows, s.columns, s.address, len(s.raw)] for s in checks],
            checked=checked,
            generation=generation | recommended,
        )
        text = manifest.to_json()
        _write(part / names.MANIFEST, text.encode())
    nbytes = sum(f.stat().st_size for f in out.iterdir())
    return WrittenBundle(out, json.loads(text)["id"], nbytes, time.perf_counter() - start)


def model_name(checkpoint: "Checkpoint") -> str:
    """What a model's files call it: ``general.name`` of a GGUF file, or its family and size, as in ``llama 135M``."""
    from roofline.common.units import human_count
    from roofline.weights.facts import facts_of

    name = checkpoint.metadata.get("general.name") if checkpoint.kind == "gguf" else None
    if isinstance(name, str) and name.strip():
        return " ".join(name.split())
    facts = facts_of(checkpoint.tensors, 0, checkpoint.config["family"], checkpoint.kind)
    return f"{facts.family} {human_count(facts.parameters)}"


def _recommended(checkpoint: "Checkpoint") -> JsonObject:
    from roofline.weights.vectors import recommended_kind

    warn_of_unused(checkpoint)
    parts = {} if checkpoint.other_parts is None else {"other_parts": checkpoint.other_parts.as_json()}
    return {"sampling": recommended_sampling(checkpoint), "pooling": recommended_kind(checkpoint), **parts}


def _origin(checkpoint: "Checkpoint", files: JsonMapping, weights: str) -> JsonObject:
    """The manifest's fields about the model and what compiled it."""
    import roofline
    from roofline import _native

    layout, code = _native.versions()
    return {
        "made_by": f"roofline {roofline.__version__}",
        "target": "cpu",
        "format": names.FORMAT,
        "layout": layout,
        "code": code,
        "files": files,
        "config": dict(checkpoint.config),
        "tensors": {n: [t.format, list(t.shape)] for n, t in checkpoint.tensors.items()},
        "weights_hash": weights,
    }


def _program_files(program: "Program", lowered: Any, generation: JsonMapping, weights: str) -> dict[str, bytes]:
    from roofline import _native
    from roofline.backends.cpu.lowered import Identity, to_bytes
    from roofline.program.text import print_program

    text = print_program(program).encode()
    special = generation.get("bos_id"), tuple(generation.get("eos_ids", ()))
    identity = Identity(weights, hashlib.sha256(text).hexdigest(), *special)
    return {names.CODE: to_bytes(lowered, identity, _native.versions()), names.PROGRAM: text}


def _text_files(source: "Checkpoint", needs_text: bool) -> tuple[dict[str, bytes], JsonObject]:
    """The files of the text side, and the manifest's `generation`, which says why where there is no tokenizer."""
    try:
        tokenizer, template = load_text(source)
    except RooflineError as error:
        if needs_text:
            raise
        return {}, {"missing": _without_place(str(error), source.path)}
    files = {names.TOKENIZER: tokenizer.to_bytes()}
    if not template.is_default:
        files[names.TEMPLATE] = template.source.encode()
    from roofline.text.templates.simple_template_parser import make_outline

    return files, {
        "outline": make_outline(template.source),
        "bos_id": tokenizer.bos_id if (tokenizer.bos_id or 0) < source.config["vocab"] else None,
        "eos_ids": list(tokenizer.eos_ids),
        "add_bos": tokenizer.add_bos,
        "bos_token": template.bos_token,
        "eos_token": template.eos_token,
    }


def _without_place(message: str, path: Path) -> str:
    """A message about a model's files without where they lie: in a bundle that says nothing to others."""
    return (
        message.replace(f"{path}: ", "")
        .replace(f"{path}/", "")
        .replace(f"{path.parent}/", "")
        .replace(str(path), "the model")
    )


def _check(path: Path, layout: "ImageLayout", checks: "list[Sample]") -> JsonObject:
    """The kernels of every instruction set here, run on the written file; says what was checked."""
    from roofline import _native
    from roofline.backends.cpu.memory import map_image
    from roofline.backends.cpu.truth import check_samples
    from roofline.hardware.detect import detect

    isas = _native.isas()
    image = map_image(path, layout.nbytes)
    for isa in isas:
        check_samples(isa, image.address, checks)
    return {"build": _native.build_id(), "chip": detect().chip, "isas": isas}


def _write_image(
    path: Path,
    program: "Program",
    layout: "ImageLayout",
    source: "Checkpoint",
    threads: int,
    report: WriteReport | None,
) -> JsonObject:
    """weights.bin, part by part, so that a large model needs no second copy in memory."""
    from roofline import _native
    from roofline.backends.cpu.memory import image_parts

    parts = list(image_parts(program, layout, source, threads))
    scratch = _native.Memory(max(size for _, size, _ in parts))
    view, digest = scratch.view(), hashlib.sha256()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:

        def put(data: Any) -> None:
            hashing = pool.submit(digest.update, data)  # frees the GIL
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            hashing.result()

        at = 0
        for place, size, fill in parts:
            put(bytes(place - at))
            fill(scratch.address, view[:size])
            put(view[:size])
            at = place + size
            if report is not None:
                report(at, layout.nbytes)
        # On disk, and out of memory: pages that were written are small, those read through huge-page advice are not.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"bytes": at, "sha256": digest.hexdigest()}


def _write(path: Path, data: bytes) -> JsonObject:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@contextmanager
def _place(out: Path, nbytes: int) -> Iterator[Path]:
    """A new directory beside `out` that takes its place in the end, and disappears on any failure before. A link
    stays; the directory behind it is replaced."""
    try:
        place = out.resolve()
        if out.exists() and not is_bundle(out) and not (out.is_dir() and not any(out.iterdir())):
            raise PlaceError(f"{out} is there and is no bundle; choose another place, or remove it")
        place.parent.mkdir(parents=True, exist_ok=True)
        sweep(place.parent)
        free = shutil.disk_usage(place.parent).free
        if free < nbytes:
            raise CapacityError(f"a bundle in {place.parent}", nbytes, free, "bytes of disk", "Free some space.")
        part = place.parent / f".{place.name}.part-{secrets.token_hex(4)}"
        part.mkdir()
        with _locked(part):
            try:
                yield part
                _swap(part, place)
            finally:
                shutil.rmtree(part, ignore_errors=True)  # not there any more when all went well
    except OSError as error:
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another folder"
        raise PlaceError(f"{out} cannot be written: {cause_of(error)}; {remedy}") from error


def _swap(part: Path, out: Path) -> None:
    """Rename; an old bundle goes away first, and stays usable for those who have it open."""
    _sync(part)
    old = None
    while True:
        if out.exists() and any(out.iterdir()):
            old = out.parent / f".{out.name}.part-{secrets.token_hex(4)}"
            out.rename(old)
        try:
            part.rename(out)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was as quick
                raise
    _sync(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove temporary directories that killed processes left in a folder."""
    for part in folder.glob(".*.part-*"):
        try:
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                with _locked(part):
                    shutil.rmtree(part, ignore_errors=True)
        except OSError:
            continue  # in use, or gone meanwhile


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on a directory; the kernel drops it when we die. Raises BlockingIOError when another has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
