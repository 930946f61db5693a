"""What bundles were compiled from: this machine remembers it, and the bundles, which may be given away, do not."""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from roofline.common import env, files
from roofline.common.fields import has_type

MOST = 16  # of one bundle: equal files may lie in several places


@dataclass(frozen=True)
class BundleOrigin:
    """A file or folder of weights, and its identity when it was compiled (`bundle_cache.key_of`)."""

    path: str
    key: str


def remember(bundle_id: str, origin: BundleOrigin) -> None:
    """Keep an origin of the bundle with this `id`. Where ROOFLINE_HOME cannot be written, a warning says so."""
    with files.where_possible("what bundles were compiled from is", _folder()), _locked(bundle_id):
        older = [other for other in origins(bundle_id) if other != origin and os.path.exists(other.path)]
        _write(bundle_id, [origin, *older][:MOST])


def forget(bundle_id: str, origin: BundleOrigin) -> None:
    """Drop one of the origins of a bundle."""
    with files.where_possible("what bundles were compiled from is", _folder()), _locked(bundle_id):
        _write(bundle_id, [other for other in origins(bundle_id) if other != origin])


def origins(bundle_id: str) -> list[BundleOrigin]:
    """What the bundle with this `id` was compiled from here, the last first; empty where that is not known."""
    try:
        values = json.loads((_folder() / f"{bundle_id}.json").read_bytes())
    except (OSError, ValueError):
        return []
    if not has_type(values, list):
        return []
    return [
        BundleOrigin(value["path"], value["key"])
        for value in values
        if isinstance(value, dict) and has_type(value.get("path"), str) and has_type(value.get("key"), str)
    ]


def source_of(bundle_id: str) -> str | None:
    """A path that the bundle was compiled from and that is still there."""
    return next((origin.path for origin in origins(bundle_id) if os.path.exists(origin.path)), None)


def _write(bundle_id: str, remaining: list[BundleOrigin]) -> None:
    file = _folder() / f"{bundle_id}.json"
    if remaining:
        files.write_atomically(file, json.dumps(list(map(asdict, remaining)), indent=1) + "\n")
    else:
        file.unlink(missing_ok=True)


def _locked(bundle_id: str) -> AbstractContextManager[None]:
    return files.locked(_folder() / f".{bundle_id[:16]}.lock")


def _folder() -> Path:
    return env.home() / "origins"
