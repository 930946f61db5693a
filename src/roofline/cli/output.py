"""What commands print: JSON, and tables."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Column, Table

NARROWEST = 12  # characters of a column of words: less is not read
LONGEST_FIGURE = 24  # characters of a figure with its unit and its range: more is a sentence, which may be broken
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


def print_table(out: "Console", table: "Table", dispensable: Sequence[str] = (), keys: int = 1) -> None:
    """Print a table whose figures are never cut, however narrow the terminal is: rich would cut them, and leave columns
    out without a word.

    dispensable: columns that are left out of a terminal that is too narrow, the first one first, of which a note tells;
    keys: where the others are still too wide, the columns that do not fit follow in further tables, and each begins
    with so many of the first ones.
    """
    for column in table.columns:
        cells = _plain_cells(column)
        column.no_wrap = column.no_wrap or _are_figures(cells[1:])
        column.min_width = max(map(_width, cells)) if column.no_wrap else min(max(map(_width, cells)), NARROWEST)
    left_out = []
    for name in dispensable:
        if _least_width(table, table.columns) <= out.width:
            break
        table.columns[:] = [column for column in table.columns if column.header != name]
        left_out.append(name)
    title = table.title
    for at, columns in enumerate(_parts(table, keys, out.width)):
        if at:
            out.print()
        table.columns[:], table.title = columns, None if at else title
        for number, column in enumerate(table.columns):
            column._index = number  # by which rich knows the first and the last
        least = _least_width(table, columns)
        out.print(table, width=max(out.width, least), crop=least <= out.width)
    if left_out:
        out.print(f"not in {out.width} columns: {', '.join(left_out)}; --json has all", highlight=False)


def _parts(table: "Table", keys: int, width: int) -> "list[list[Column]]":
    """The columns, divided into as few tables as there is room for."""
    first, behind = table.columns[:keys], table.columns[keys:]
    parts = [list(first)]
    for column in behind:
        if len(parts[-1]) > keys and _least_width(table, [*parts[-1], column]) > width:
            parts.append([_copied(key) for key in first])
        parts[-1].append(column)
    return parts


def _copied(column: "Column") -> "Column":
    """The same column for another table: its cells are shared, its place is not."""
    copied = column.copy()
    copied._cells = column._cells
    return copied


def _least_width(table: "Table", columns: "Sequence[Column]") -> int:
    """Characters that these columns of a table take at least."""
    around = table.padding[1] + table.padding[3] + (table.box is not None)
    return sum((column.min_width or 0) + around for column in columns) - around


def _plain_cells(column: "Column") -> list[str]:
    """The heading and the cells of a column without their markup."""
    from rich.text import Text

    return [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]


def _width(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.splitlines()), default=0)


def _are_figures(cells: Sequence[str]) -> bool:
    """Whether a column has figures, with their units, and nothing but figures."""
    figures = [cell for cell in cells if cell not in ("", "-", "?", ".")]
    return bool(figures) and all(len(cell) <= LONGEST_FIGURE and re.match(r"[-+<>~(]?\d", cell) for cell in figures)


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
