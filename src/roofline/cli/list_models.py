"""roofline list: what is here, and what could be."""

from typing import Annotated

import typer


def command(
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list of the pulled models")] = False,
) -> None:
    """List the pulled models and the short names of the catalogue."""
    from dataclasses import asdict

    from roofline.weights import sources

    models = sources.list_models()
    if as_json:
        import json

        typer.echo(json.dumps([{**asdict(m), "path": str(sources.stored(m.name))} for m in models], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    from roofline.common.units import human_bytes

    table = Table("model", "size", "licence", "pulled", "source", box=None)
    for model in models:
        table.add_row(model.name, human_bytes(model.size), model.licence, model.pulled_at[:10], model.source)
    here = {model.name for model in models}
    for entry in sources.catalog().values():
        if entry.name not in here:
            table.add_row(entry.name, human_bytes(entry.size), entry.licence, "no", entry.source)
    Console().print(table)
