"""The glossary has the words that this project uses in a sense of its own, in order, each in about two sentences."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/explanation/glossary.md").read_text()
ENTRIES = re.findall(r"^(\S[^\n]*)\n: (.+)$", PAGE, re.MULTILINE)
NEEDED = [
    "order",
    "regime",
    "recipe",
    "piece",
    "layout",
    "image",
    "roof",
    "segment",
    "row",
    "receipt",
    "page",
    "share",
    "grid",
    "bundle",
    "fingerprint",
    "variant",
    "tile",
    "gate",
    "golden",
    "batch",
    "pass",
    "rank",
    "replica",
    "backend",
    "executable",
    "trait",
]


def test_every_needed_word_has_an_entry() -> None:
    words = [word for title, _ in ENTRIES for word in title.split(", ")]
    assert set(NEEDED) <= set(words)
    assert "KV group" in words


def test_entries_are_sorted_and_short() -> None:
    titles = [title.lower() for title, _ in ENTRIES]
    assert titles == sorted(titles)
    assert [title for title, text in ENTRIES if len(text) > 500] == []
