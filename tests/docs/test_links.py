"""What the documents name exists: links, headings that links point into, and paths of files in this repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "roofline"
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
# Documents that tell what was: paths in them are those of their day.
HISTORY = {"CHANGELOG.md", "docs/log.md"}
SUFFIXES = "py|toml|md|cpp|h|txt|json|html"
PATH = re.compile(rf"`((?:[\w.*-]+/)*[\w.*-]+\.(?:{SUFFIXES}))(?:::\w+)?`|`((?:[\w.-]+/)+)`")
# Files that users have or commands write: not of this repository.
THEIRS = {
    *("run.html", "runs/bookings/run.html", "make_bookings.py"),
    *("manifest.json", "config.json", "order.json", "relay.json", "record.json", "pyproject.toml", "roofline.h"),
    *(
        "cell.json",
        "answer.c",
        "tokenizer.json",
        "card.json",
        "reference.json",
        "lengths.json",
        "owner.json",
        "command.json",
        "grid.json",
        "summary.json",
        "program.txt",
        "checkpoints/",
    ),
    *(
        "generation_config.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "unicode.cpp",
        "ndarray-cache.json",
    ),
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _is_there(path: str, beside: Path) -> bool:
    """Whether a file or folder whose path ends so is in the repository."""
    if any(list(folder.glob(path)) for folder in (beside, ROOT, PACKAGE)):
        return True
    return any(list((ROOT / folder).rglob(path)) for folder in ("src", "native", "tests", "benchmarks", "tools"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", _prose(document)):
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in {_anchor(heading) for heading in headings}, f"{target}#{anchor}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if _name(d) not in HISTORY], ids=_name)
def test_paths_exist(document: Path) -> None:
    paths = {match[1] or match[2] for match in PATH.finditer(_prose(document))}
    lost = [
        path
        for path in sorted(paths - THEIRS)
        if "NAME" not in path and "ROOM" not in path and not _is_there(path.rstrip("/"), document.parent)
    ]
    assert not lost, f"{_name(document)} names files that are not there: {', '.join(lost)}"


def test_tests_that_the_documents_name_exist() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    for document in DOCUMENTS:
        for file, test in re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)::(test_\w+)", document.read_text()):
            assert f"def {test}(" in texts.get(file, ""), f"{_name(document)}: {file}::{test}"


def test_sources_name_documents_that_exist() -> None:
    sources = [
        path
        for folder in ("src", "native", "include", "benchmarks", "tools", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".toml"}
    ]
    for source in (*sources, ROOT / "Makefile", ROOT / "CMakeLists.txt"):
        for target in re.findall(r"(?<!/)\bdocs/[\w/-]+\.md\b", source.read_text()):
            assert (ROOT / target).exists() or "NAME" in target, f"{_name(source)}: {target}"
