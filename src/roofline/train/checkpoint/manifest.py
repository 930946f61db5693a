"""The manifest of a checkpoint: which checkpoints a store has, what a run recorded with each, where its tensors are.

STORE/step-00000200/manifest.json is written last, by rank 0, when all other files of the checkpoint are stored. It has
the place and the hash of each piece of a tensor, the run's facts, and its own hash. A step without a manifest is an
unfinished attempt, which is never read.
"""

import json
import re

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError, Store

MANIFEST = "manifest.json"
VERSION = 1


def folder(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def steps(store: Store) -> list[int]:
    """The steps with a complete checkpoint, ascending."""
    places = (entry.name.split("/") for entry in store.list())
    complete = (step_of(place[0]) for place in places if len(place) == 2 and place[1] == MANIFEST)
    return sorted(step for step in complete if step is not None)


def open_place(place: str) -> tuple[Store, int | None]:
    """The store of a checkpoint folder, and the step if the place names one (".../step-00000200")."""
    stem, _, last = place.rstrip("/").rpartition("/")
    step = step_of(last)
    return (open_store(place), None) if step is None else (open_store(stem or "."), step)


def facts(store: Store, step: int) -> JsonObject:
    """What a run recorded about itself with a checkpoint. Raises ConfigError if it is missing or damaged."""
    return dict(read(store, step)["facts"])


def read(store: Store, step: int) -> JsonObject:
    """A checked manifest. Raises ConfigError."""
    place = f"{folder(step)}/{MANIFEST}"
    try:
        manifest: JsonObject = json.loads(store.get(place))
        intact = manifest.pop("xxh3") == _hash(manifest)
        fits = manifest["version"] == VERSION and manifest["step"] == step
    except MissingError as error:
        raise ConfigError(f"{store.url} has no complete checkpoint of step {step}: {MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{store.url}/{place} is damaged: {error!r}") from error
    if not intact:
        raise ConfigError(f"{store.url}/{place} is damaged: it is not what was written")
    if not fits:
        raise ConfigError(f"{store.url}/{place} is of another version, or of another step")
    return manifest


def encode(step: int, facts: JsonMapping, tensors: JsonMapping) -> bytes:
    """A manifest with its hash, as it is stored."""
    manifest = {"version": VERSION, "step": step, "facts": facts, "tensors": tensors}
    return json.dumps({"xxh3": _hash(manifest), **manifest}).encode()


def _hash(manifest: JsonMapping) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
