"""roofline rm: delete a pulled model, or bundles that were compiled on first use."""

from pathlib import Path
from typing import Annotated

from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.units import human_bytes


def command(
    name: Annotated[str, Argument("A model or a bundle that `roofline list` shows, or a bundle's source.")],
) -> None:
    """Delete a pulled model and the bundles compiled from it, or the cached bundles of a path."""
    from roofline.bundle import bundle_cache as cached
    from roofline.weights import sources

    try:
        path = sources.stored_path(name)
    except ConfigError:
        path = None  # not a name that a model could have
    source = (path or Path(name)).resolve()
    bundles = [b for b in cached.entries() if b.path.name == name or b.source == source]
    freed = sum(cached.remove(bundle) for bundle in bundles)
    if path is not None or not bundles:
        freed += sources.remove(name)
    print(f"removed {name}, {human_bytes(freed)}")
