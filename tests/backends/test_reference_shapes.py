"""Models whose layers keep keys of several shapes on the reference: whole, in chunks, on ranks and in stages."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders, thread_ranks
sys.path.insert(0, str(Path(__file__).parent))  # shard_cases

import program_builders as builders
from shard_cases import CHUNKS, IDS, LIMITS, WHOLE
from test_reference_shard import ROUNDING, part, run, together

from roofline.backends.reference.executable import ReferenceExecutable
from roofline.common.errors import UnsupportedError
from roofline.program.ir import Share
from tests.backends.oracle import oracle_logits
from tests.backends.shaped_models import BASE, MODELS

CASES = {name: config for name, config in MODELS.items() if name != "largest"}


@pytest.mark.parametrize("name", CASES)
def test_a_program_has_the_logits_of_the_family_s_text(name: str) -> None:
    model = builders.build(CASES[name], "F32")
    wanted = oracle_logits(model.family, model.cfg, model, IDS)
    for after in ("trace", "fuse"):
        got = run(part(model, after, Share()), model, WHOLE)
        assert np.abs(got - wanted).max() < (ROUNDING if after == "trace" else 0.02) * np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_neighbours_change_no_bit(name: str) -> None:
    model = builders.build(CASES[name], "Q8_0")
    program = part(model, "plan", Share())
    assert np.array_equal(run(program, model, CHUNKS), run(program, model, WHOLE))


@pytest.mark.parametrize("name", ["apart", "sharing"])
def test_ranks_have_the_logits_of_one_within_rounding(name: str) -> None:
    model = builders.build(CASES[name], "F32")
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    for rows in together(model, "shard", 2):
        assert np.abs(rows - alone).max() < ROUNDING * np.abs(alone).max()


def test_heads_over_one_cache_that_ranks_would_divide_in_two_ways_are_refused() -> None:
    """Blocks of 32 columns hold two heads, which are of one kv head in wide layers, and of two in the others."""
    sizes = {"width": 96, "heads": 6, "kv_heads": 6, "wide_heads": 12, "wide_kv_heads": 6, "wide_dim": 16}
    model = builders.build({**BASE, **sizes}, "Q8_0")
    with pytest.raises(UnsupportedError, match="layers with different heads over one cache"):
        part(model, "shard", Share(0, 2))


@pytest.mark.parametrize("name", ["apart", "sharing"])
def test_stages_one_after_the_other_equal_the_whole(name: str) -> None:
    model = builders.build(CASES[name], "Q8_0")
    parts = [part(model, "plan", Share(0, 1, number, 2)) for number in range(2)]
    runs = [ReferenceExecutable(p, model.read, LIMITS, 16, 256) for p in parts]
    got = []
    for segments, rows in CHUNKS:
        carried: dict[str, Any] = {}
        for each in runs:
            each.batch.fill(segments, rows)
            carried = {each.program.logits: each.run(carried)}
        got.append(next(iter(carried.values())).numpy())
    assert np.array_equal(np.concatenate(got), run(part(model, "plan", Share()), model, CHUNKS))
