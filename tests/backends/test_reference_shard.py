"""Ranks and stages, as threads: their logits beside those of one Program."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders, thread_ranks

sys.path.insert(0, str(Path(__file__).parent))  # shard_cases

import program_builders as builders
from shard_cases import CHUNKS, FAMILIES, LIMITS, MODELS, REFUSED, REFUSED_FORMS, WHOLE, build
from thread_ranks import Member, Threads

from roofline import ops
from roofline.backends.reference.executable import ReferenceExecutable
from roofline.backends.reference.interpreter import Interpreter
from roofline.common.errors import UnsupportedError
from roofline.models import registry
from roofline.ops.batch import Segment
from roofline.program.compile import stages
from roofline.program.ir import Program, Share
from roofline.program.target import CPU

torch = pytest.importorskip("torch", reason="the reference is written in torch")

ROUNDING = 3e-6  # of the largest logit: float32 sums in another order; 1.2e-6 was the most over all cases below
Steps = list[tuple[list[Segment], list[int]]]


def run(program: Program, model: builders.Model, steps: Steps, group: Member | None = None) -> np.ndarray:
    """Logits of all steps, one after the other."""
    executable = ReferenceExecutable(program, model.read, LIMITS, 16, 256, group=group)
    out = []
    for segments, rows in steps:
        executable.batch.fill(segments, rows)
        executable.forward()
        out.append(executable.logits().copy())
    return np.concatenate(out)


def part(model: builders.Model, after: str, share: Share, target: Any = CPU) -> Program:
    """The Program after a pass; those behind it are not run."""
    passed = stages(model.family, model.cfg, model.tensors, target, share=share)
    return next(program for name, program in passed if name == after)


def together(model: builders.Model, after: str, ranks: int, steps: Steps = WHOLE) -> list[np.ndarray]:
    """Each rank's logits."""
    parts = [part(model, after, Share(rank, ranks)) for rank in range(ranks)]
    return Threads(ranks).run(lambda member: run(parts[member.rank], model, steps, member))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_those_of_one_rank_within_rounding(name: str, ranks: int) -> None:
    model = build(name, "F32")
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    found = together(model, "shard", ranks)
    assert np.abs(found[0] - alone).max() < ROUNDING * np.abs(alone).max()
    assert all(np.array_equal(other, found[0]) for other in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_logits_of_one_rank_within_rounding(name: str) -> None:
    model = build(name, "F32")
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    for ranks in (2, 3):
        rows = together(model, "shard", ranks)
        assert np.abs(rows[0] - alone).max() < ROUNDING * np.abs(alone).max()
        assert all(np.array_equal(other, rows[0]) for other in rows)


def test_every_family_is_divided_or_stands_among_those_that_are_not() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "parallel.md").read_text()
    listed = page[page.index("**What is refused") :].split("\n\n")[0]
    for name, config in (REFUSED | REFUSED_FORMS).items():
        assert name in listed
        model = builders.build(config, "F32")
        for ranks in (2, 3):
            with pytest.raises(UnsupportedError, match="under tensor_parallel"):
                part(model, "shard", Share(0, ranks))
    tried = {registry.get(str(config["family"])) for config in (*MODELS.values(), *FAMILIES.values())}
    refused = {registry.get(str(config["family"])) for config in REFUSED.values()}
    ours = {name for name, module in registry._FAMILIES.items() if str(module).startswith("roofline.models.")}
    assert {registry.get(name) for name in ours} == tried | refused
    assert not tried & refused


@pytest.mark.parametrize(("family", "form", "ranks"), [("phi3", "Q4_K", 3), ("glm4", "Q8_0", 2)])
def test_gate_and_up_in_one_quantised_matrix_are_the_file_s(family: str, form: str, ranks: int) -> None:
    """Rows of both halves go to a rank, and columns of the matrix behind them in whole blocks."""
    config = builders.WIDE | {"heads": 12, "kv_heads": 3, "ffn": 768, "layers": 1, "family": family}
    model = builders.build(config, form)
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    assert np.abs(together(model, "shard", ranks)[0] - alone).max() < ROUNDING * np.abs(alone).max()


@pytest.mark.parametrize(("form", "ranks"), [("Q4_K", 4), ("Q8_0", 3)])
def test_quantised_columns_are_the_file_s(form: str, ranks: int) -> None:
    config = builders.WIDE | {"heads": 16, "ffn": 1536, "layers": 1} if form == "Q4_K" else MODELS["groups of three"]
    model = builders.build(config, form)
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    assert np.abs(together(model, "shard", ranks)[0] - alone).max() < ROUNDING * np.abs(alone).max()


@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_in_rank_order_chunks_and_neighbours_change_no_bit(name: str) -> None:
    model = build(name, "Q8_0")
    whole, chunked = (together(model, "plan", 2, steps) for steps in (WHOLE, CHUNKS))
    assert all(np.array_equal(other, whole[0]) for other in (*whole, *chunked))
    # Every sum of 8-bit rows may round the next rows otherwise, so that is all that can be said of other degrees.
    alone = run(part(model, "plan", Share()), model, WHOLE)
    assert np.abs(whole[0] - alone).max() < 0.01 * np.abs(alone).max()


def test_passes_after_shard_change_no_bit() -> None:
    model = build("llama", "Q8_0")
    legal = together(model, "legalize", 3)[0]
    assert all(np.array_equal(together(model, after, 3)[0], legal) for after in ("merge", "fuse", "plan"))


@pytest.mark.parametrize("name", ["llama", "mpt"])
@pytest.mark.parametrize("after", ["stage", "plan"])
def test_stages_one_after_the_other_equal_the_whole(name: str, after: str) -> None:
    model = build(name, "Q8_0")
    parts = [part(model, after, Share(0, 1, number, 2)) for number in range(2)]
    runs = [ReferenceExecutable(p, model.read, LIMITS, 16, 256) for p in parts]
    assert runs[0].page_bytes == runs[1].page_bytes
    got = []
    for segments, rows in CHUNKS:
        carried: dict[str, Any] = {}
        for each in runs:
            each.batch.fill(segments, rows)
            carried = {each.program.logits: each.run(carried)}
        got.append(next(iter(carried.values())).numpy())
    alone = run(part(model, "narrow" if after == "stage" else "plan", Share()), model, CHUNKS)
    assert np.array_equal(np.concatenate(got), alone)


def test_a_part_alone_is_refused() -> None:
    model = build("llama", "F32")
    with pytest.raises(UnsupportedError, match="a Program for 2 ranks is not supported: there are 1 here"):
        Interpreter(part(model, "plan", Share(0, 2)), model.read)
    with pytest.raises(UnsupportedError, match="there are 3 here"):
        Interpreter(part(model, "plan", Share(0, 2)), model.read, Member(Threads(3), 0))


def test_references_of_the_collectives() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert ops.all_reduce(x, 1) is x
    assert ops.all_gather(x, (3,)) is x
    with pytest.raises(UnsupportedError, match="all_reduce among 2 ranks is not supported: there are 1 here"):
        ops.all_reduce(x, 2)
    with pytest.raises(UnsupportedError, match="all_gather among 2 ranks"):
        ops.all_gather(x, (3, 3))

    def work(member: Member) -> Any:
        mine = x + member.rank
        return ops.all_reduce(mine, 2, member), ops.all_gather(mine[:, : 3 - member.rank], (3, 2), member)

    for total, beside in Threads(2).run(work):
        assert torch.equal(total, 2 * x + 1)
        assert torch.equal(beside, torch.cat([x, x[:, :2] + 1], dim=1))


def test_part_of_a_table_gives_zeros_for_other_ids() -> None:
    table, ids = torch.randn(6, 4), torch.tensor([0, 5, 2, 3])
    parts = ops.embed(ids, table[:3], first=0), ops.embed(ids, table[3:], first=3)
    assert torch.equal(parts[0] + parts[1], ops.embed(ids, table))
    assert torch.equal(parts[1][0], torch.zeros(4))


def test_fast_sums_may_differ_by_rounding_alone() -> None:
    model = build("llama", "F32")
    fast = replace(CPU, orders={**CPU.orders, "all_reduce": ""})
    parts = [part(model, "shard", Share(rank, 3), fast) for rank in range(3)]
    sums = Threads(3).run(lambda member: run(parts[member.rank], model, WHOLE, member))
    alone = run(part(model, "narrow", Share()), model, WHOLE)
    assert np.abs(sums[0] - alone).max() < ROUNDING * np.abs(alone).max()
