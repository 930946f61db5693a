"""The functions that docs/map.md lists under "Hops" exist, and the counts in its table are those of the lists."""

import ast
import re
from pathlib import Path

import roofline

PACKAGE = Path(roofline.__file__).parent
MAP = (PACKAGE.parents[1] / "docs" / "map.md").read_text()
HOPS = MAP.split("## Hops\n")[1].split("\n## ")[0]
LISTS = re.findall(r"^\*\*(.+?)\.\*\* (.+)$", HOPS, re.MULTILINE)
# Named in a sentence beside a list: what was, and the file or the maker of a function.
ASIDE = re.compile(r"\((?:of|made by) [^)]*\)|Before, .*|The two more .*|From a bundle .*|A step that .*")


def _functions(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", ASIDE.sub("", text))


def _defined(wanted: set[str]) -> set[str]:
    """All that is defined in files in which one of the names, behind its class, stands."""
    names: set[str] = set()
    of_interest = re.compile("|".join(f"def {re.escape(name.rpartition('.')[2])}\\b" for name in wanted))
    for text in (path.read_text("utf-8") for path in PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if of_interest.search(text) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return names


def test_listed_functions_exist() -> None:
    assert len(LISTS) == 4
    known = _defined({name for _, text in LISTS for name in _functions(text)})
    for title, text in LISTS:
        lost = [name for name in _functions(text) if "::" not in name and name not in known]
        assert not [name for name in lost if name != "pack"], f"docs/map.md, Hops, {title}: {lost}"


def test_counts_are_those_of_the_lists() -> None:
    rows = re.findall(r"^\| (one .+?) \| \d+ \| (\d+) \|$", HOPS, re.MULTILINE)
    for (title, text), (row, count) in zip(LISTS, rows, strict=True):
        assert row.lower().startswith(title.lower()), (row, title)
        assert int(count) == len(_functions(text)), (title, len(_functions(text)))
