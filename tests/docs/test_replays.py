"""docs/replays/published: each page is what the command writes from the published figures and the points beside it."""

from pathlib import Path

import pytest

from roofline.bench.replays.published import NAMES
from tests.command_line import call_roofline

FOLDER = Path(__file__).parents[2] / "docs" / "replays" / "published"


def test_every_publication_has_a_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(NAMES)


# Those whose models are compiled for many devices take seconds.
SLOW_NAMES = {"mlc-amd", "rocm-llm-opt"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_NAMES)) for name in NAMES]
)
def test_a_page_is_what_the_command_writes(name: str, tmp_path: Path) -> None:
    """After a change of figures, of the table of products or of the page's form, write it anew with this command."""
    words = ["bench", "replay", name, "--markdown", tmp_path / "page.md"]
    words += [word for path in sorted(FOLDER.glob(f"{name}.json*")) for word in ("--points", path)]
    assert call_roofline(words).exit_code == 0
    assert (FOLDER / f"{name}.md").read_text() == (tmp_path / "page.md").read_text()
