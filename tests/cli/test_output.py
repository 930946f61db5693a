"""Tables in terminals of any width: every figure of theirs appears, and appears whole."""

import re
from io import StringIO

import pytest
from rich.console import Console

from roofline.cli.output import plain_table, print_table, ruled_table

WIDTHS = (40, 60, 80, 100, 120)


def printed(table, width: int, **arguments) -> str:
    out = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    print_table(out, table, **arguments)
    return out.file.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_whole_and_beside_its_row(width: int) -> None:
    headings = ("arrangement", "concurrency", *(f"h{n}" for n in range(9)), "bound")
    rows = [(f"TP {n} x 1", f"{n:,}", *(f"{n}{k},490.1 ms" for k in range(9)), "memory") for n in range(1, 4)]
    table = ruled_table("Expected", headings, ("arrangement", "bound"), padding=1)
    for row in rows:
        table.add_row(*row)
    text = printed(table, width, keys=2)
    for heading in headings:
        assert heading in text
    for row in rows:
        for cell in row:
            assert cell in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("Expected") == 1
    # Wherever a figure stands, its row begins with the row's name and concurrency.
    for line in text.splitlines():
        if "1,490.1" in line or "3,490.1" in line:
            assert re.match(r"TP (\d) x 1 +\1 ", line)


@pytest.mark.parametrize("width", WIDTHS)
def test_columns_of_figures_are_known_by_their_cells(width: int) -> None:
    rows = [("a model with a long name of several words", *(f"{n}23,456.7" for n in range(7)), "-")] * 2
    text = printed(plain_table(("model", *"abcdefgh"), rows), width)
    for cell in rows[0][1:-1]:
        assert text.count(cell) == 2
    assert max(map(len, text.splitlines())) <= width
