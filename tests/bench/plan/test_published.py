"""What the guide says: its table of published figures, and the fleet that it shows."""

from pathlib import Path

import pytest

from benchmarks import published
from roofline.bench.plan.fleet.spec import read_spec

GUIDE = (Path(__file__).parents[3] / "docs/how-to/plan.md").read_text()


def test_the_fleet_of_the_guide_can_be_read(tmp_path: Path) -> None:
    _, _, rest = GUIDE.partition("```toml\n")
    spec = tmp_path / "fleet.toml"
    spec.write_text(rest.partition("```")[0])
    assert read_spec(spec).policies.routing == ("round-robin", "least-loaded", "power-of-two", "prefix")


def test_a_published_decode_is_beside_the_time_of_its_bytes() -> None:
    least = published._decode("llama-2-7b", "f16", "MI210", 1, 1, 32)
    # 6.6 billion weights of two bytes that a token meets, at 1.6384 TB/s.
    assert least == pytest.approx(2 * 6.607e9 / 1.6384e12, rel=0.01)


@pytest.mark.slow
def test_the_table_of_the_guide_is_as_computed() -> None:
    assert published.table() in GUIDE
