"""What commands print: JSON, and tables."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def print_json(value: object, indent: int | None = None) -> None:
    """One JSON value on stdout."""
    import json

    print(json.dumps(value, indent=indent))


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]], **style: Any) -> "Table":
    """A table without rules. style: further arguments of rich's `Table`."""
    from rich.table import Table

    table = Table(*headings, box=None, **style)
    for row in rows:
        table.add_row(*row)
    return table


def ruled_table(title: str | None, headings: Sequence[str], left_aligned: Sequence[str], padding: int = 0) -> "Table":
    """An empty table of figures with a rule under its headings. left_aligned: the columns of words."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, padding, 0, 0), pad_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left_aligned else "right", no_wrap=True)
    return table
