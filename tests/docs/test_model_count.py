"""The figures of how many kinds of models are read are those of now."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="it lists the model types")
pytest.importorskip("gguf", reason="it lists the architectures")

from roofline.weights.families.table import MODEL_TYPES
from tools.model_count import PAGES, is_read, with_count


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_says_how_many_are_read(page: Path) -> None:
    text = page.read_text("utf-8")
    assert with_count(text) == text, "write it: python -m tools.model_count"


def test_what_is_read_is_what_has_a_reader() -> None:
    assert all(map(is_read, MODEL_TYPES))
    assert not any(map(is_read, ("bloom", "of nobody", "")))


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ValueError, match="the page needs one <!-- count"):
        with_count("nothing")
