"""What commands print: JSON, and tables."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

NARROWEST = 12  # characters of a column of words: less is not read
PIPE_WIDTH = 400  # columns where no terminal says how many there are: names are not cut for other programs


def print_json(value: object, indent: int | None = None) -> None:
    """One JSON value on stdout."""
    import json

    print(json.dumps(value, indent=indent))


def check_output(path: "Path | None") -> None:
    """Before minutes of measuring: raises OSError where the file that is to hold the results cannot be written. A pipe
    or a device is left alone: opening it may wait, or end what reads it."""
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return
    there = path.exists()
    path.open("ab").close()
    if not there:
        path.resolve().unlink()  # a link that leads nowhere yet stays


def console(**style: Any) -> "Console":
    """rich's console on stdout: into a pipe it writes lines as long as they are, and a pipe that closes ends it as it
    ends `print`. style: further arguments of rich's `Console`."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    out = Stdout(**style)
    return out if out.is_terminal else Stdout(**style, width=PIPE_WIDTH)


def plain_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], figures: Sequence[str] = (), **style: Any
) -> "Table":
    """A table without rules, of cells without markup. figures: columns that are never broken; style: further arguments
    of rich's `Table`."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*headings, box=None, **style)
    for row in rows:
        table.add_row(*map(escape, row))
    for column in table.columns:
        column.overflow = "fold"  # in a narrow terminal a name goes on in the next line
        column.no_wrap = column.header in figures
    return table


def print_table(out: "Console", table: "Table", dispensable: Sequence[str]) -> None:
    """Print a table. In a terminal that is too narrow for it the columns `dispensable` are left out, the first one
    first, and a note says which: rich would cut figures, and leave columns out without a word."""
    from rich.cells import cell_len
    from rich.text import Text

    for column in table.columns:
        widths = [cell_len(Text.from_markup(str(cell)).plain) for cell in (column.header, *column.cells)]
        column.min_width = max(widths) if column.no_wrap else min(max(widths), NARROWEST)
    left_out = []
    around = table.padding[1] + table.padding[3] + (table.box is not None)
    for name in dispensable:
        if sum((column.min_width or 0) + around for column in table.columns) <= out.width + around:
            break
        table.columns[:] = [column for column in table.columns if column.header != name]
        left_out.append(name)
    for number, column in enumerate(table.columns):
        column._index = number  # by which rich knows the first and the last
    out.print(table)
    if left_out:
        out.print(f"not in {out.width} columns: {', '.join(left_out)}; --json has all", highlight=False)


def ruled_table(title: str | None, headings: Sequence[str], left_aligned: Sequence[str], padding: int = 0) -> "Table":
    """An empty table of figures with a rule under its headings. left_aligned: the columns of words, which a narrow
    terminal breaks."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, padding, 0, 0), pad_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    for heading in headings:
        words = heading in left_aligned
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table
