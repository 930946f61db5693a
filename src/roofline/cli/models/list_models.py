"""roofline list: what is here, and what could be."""

from dataclasses import asdict
from pathlib import Path

from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.common.units import human_bytes


def command(as_json: AsJson = False) -> None:
    """List the pulled models with the bundles compiled from them, other bundles, and the names of the catalogue."""
    from roofline.bundle import bundle_cache as cached
    from roofline.weights import sources

    models, bundles = sources.list_models(), list(cached.entries())
    paths = {model.name: sources.stored_path(model.name) for model in models}
    sizes = {m.name: sum(b.nbytes for b in bundles if _of(b.source, paths[m.name])) for m in models}
    unowned = [bundle for bundle in bundles if not any(_of(bundle.source, path) for path in paths.values())]
    if as_json:
        records = [{**asdict(m), "path": str(paths[m.name]), "bundle_bytes": sizes[m.name]} for m in models]
        for other in unowned:
            about = {"path": str(other.path), "source": str(other.source or "")}
            records.append({"name": other.path.name, "size": other.nbytes, **about})
        print_json(records, indent=1)
        return

    bundle_sizes = {name: human_bytes(size) if size else "" for name, size in sizes.items()}
    rows = [[m.name, human_bytes(m.size), bundle_sizes[m.name], m.licence, m.pulled_at[:10], m.source] for m in models]
    unpulled = [entry for entry in sources.catalog().values() if entry.name not in sizes]
    rows += [[entry.name, human_bytes(entry.size), "", entry.licence, "no", entry.source] for entry in unpulled]
    elsewhere = [(name, hub) for name, hub in sources.hub_names().items() if hub not in sizes]
    rows += [[name, "", "", "", "no", hub] for name, hub in elsewhere]
    rows += [[b.path.name, "", human_bytes(b.nbytes), "", "", str(b.source or "damaged")] for b in unowned]
    headings = ("model", "size", "bundle", "licence", "pulled", "source")
    table = plain_table(headings, rows, figures=("size", "bundle", "pulled"))
    print_table(console(), table, dispensable=("licence", "source", "pulled", "bundle"))


def _of(source: Path | None, stored: Path | None) -> bool:
    """Whether a bundle's source is a stored model."""
    return stored is not None and source == stored.resolve()
