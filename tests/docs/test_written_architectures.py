"""The page on writing GGUF files names every architecture that is written."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the cases of the families are models of transformers")

from roofline.common.errors import UnsupportedError
from roofline.weights.config.to_gguf import form_of
from tests.models.parity_cases import CASES

PAGE = Path(__file__).parents[2] / "docs/how-to/quantise.md"


def test_every_architecture_that_is_written_stands_on_the_page() -> None:
    written = set[str]()
    for case in CASES.values():
        with suppress(UnsupportedError):
            written.add(form_of(case.config).architecture)
    assert len(written) > 40
    text = PAGE.read_text()
    assert [name for name in sorted(written) if not re.search(rf"\b{re.escape(name)}\b", text)] == []
