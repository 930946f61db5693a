"""Recurrent state among ranks, as threads: each has the slots of its own heads, all together those of one process."""

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="ranks add with torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders, thread_ranks
sys.path.insert(0, str(Path(__file__).parent))  # shard_cases

from shard_cases import CHUNKS, FAMILIES, LIMITS, WHOLE  # noqa: E402
from thread_ranks import Member, Threads  # noqa: E402

from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.cpu.executable import CpuExecutable  # noqa: E402
from roofline.backends.reference.executable import ReferenceExecutable  # noqa: E402
from roofline.common.errors import CapacityError  # noqa: E402
from roofline.models import registry  # noqa: E402
from roofline.ops.state import COLUMNS, MATRIX  # noqa: E402
from roofline.program.compile import compile_program  # noqa: E402
from roofline.program.ir import WHOLE as ONE  # noqa: E402
from roofline.program.ir import Program, Share  # noqa: E402
from roofline.program.passes.divide import divide_value_heads  # noqa: E402
from roofline.program.target import CPU  # noqa: E402
from roofline.weights.checkpoint import Checkpoint  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402
from tests.backends.hybrid_models import PUBLISHED, checkpoint  # noqa: E402

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "key heads divided": (FAMILIES["qwen3_5"], 2),
    "a key head on two ranks": (FAMILIES["qwen3_5"] | {"key_heads": 1}, 2),
    "tiles divided": (FAMILIES["qwen3_5 tiled"], 2),
    "a tile on two ranks": (FAMILIES["qwen3_5 tiled"] | {"key_heads": 4, "value_heads": 4}, 2),
    "experts": (FAMILIES["qwen3_5 with more experts"], 3),
}

# Each rank's heads of the scan, or channels where every one has rates of its own, and its groups of B and C.
SCANS: dict[str, tuple[dict[str, Any], int, list[tuple[int, int]], list[tuple[int, int]]]] = {
    "heads of one group": (FAMILIES["mamba2"], 2, [(0, 3), (3, 6)], [(0, 1), (0, 1)]),
    "groups": (FAMILIES["mamba2, groups"], 3, [(0, 4), (4, 6), (6, 8)], [(0, 2), (2, 3), (3, 4)]),
    "a group on two ranks": (FAMILIES["mamba2, two groups"], 3, [(0, 2), (2, 4), (4, 8)], [(0, 1), (0, 1), (1, 2)]),
    "channels": (FAMILIES["mamba"], 2, [(0, 64), (64, 128)], []),
    "channels, uneven": (FAMILIES["mamba, norms"], 3, [(0, 64), (64, 96), (96, 128)], []),
    "beside attention": (FAMILIES["falcon_h1, parts"], 2, [(0, 4), (4, 8)], [(0, 1), (1, 2)]),
    "beside experts": (FAMILIES["nemotron_h"], 2, [(0, 4), (4, 8)], [(0, 2), (2, 4)]),
}


def source_of(config: dict[str, Any]) -> Checkpoint:
    return random_checkpoint(config, seed=3, form="F32")


def compiled(source: Checkpoint, share: Share = ONE) -> Program:
    family, config = registry.configure(source.config)
    return compile_program(family, config, source.tensors, CPU, share=share)


def of_ranks(source: Checkpoint, ranks: int) -> list[Program]:
    """The Program of each rank: tests compile them once, and compute them in several ways."""
    return [compiled(source, Share(rank, ranks)) for rank in range(ranks)]


def executable(kind: str, source: Checkpoint, program: Program | None = None, group: Member | None = None) -> Any:
    """program: of a rank or stage; None: of the whole model."""
    program = compiled(source) if program is None else program
    if kind == "reference":
        return ReferenceExecutable(program, source.read, LIMITS, 16, 256, group=group)
    identity: Future[str] = Future()
    identity.set_result("7e57")
    sizes = {"weights_hash": identity, "isa": native.isas()[0], "threads": 1, "group": group}
    return CpuExecutable.from_program(program, source, Capacity(LIMITS, max_context=256, num_pages=16), **sizes)


def steps(made: Any, chunks: Any) -> np.ndarray:
    out = []
    for segments, rows in chunks:
        made.batch.fill(segments, rows)
        made.forward()
        out.append(np.array(made.logits()))
    return np.concatenate(out)


def slots(made: Any) -> np.ndarray:
    """[slots, values] as they lie."""
    if isinstance(made, ReferenceExecutable):
        (store,) = made._states.values()
        values: np.ndarray = store.values.reshape(len(store.values), -1).numpy()
        return values
    stored: np.ndarray = made._state.view()[: LIMITS.state_slots * made.slot_bytes].view(np.float32)
    return stored.reshape(LIMITS.state_slots, -1).copy()


def together(
    kind: str, source: Checkpoint, programs: list[Program], chunks: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each rank's logits and slots."""

    def work(member: Member) -> tuple[np.ndarray, np.ndarray]:
        made = executable(kind, source, programs[member.rank], member)
        return steps(made, chunks), slots(made)

    return Threads(len(programs)).run(work)


def first_layer(program: Program, values: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of the state of the first layer that keeps some; values: of a slot."""
    (group,) = program.state_groups.values()
    parts, at = {}, 0
    for name, shape in group.parts:
        size = int(np.prod(shape))
        parts[name] = values[at : at + size].reshape(shape)
        at += size
    return parts


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_the_reference_s_ranks_and_the_state_of_their_heads(name: str) -> None:
    config, ranks = CASES[name]
    source = source_of(config)
    programs, entire = of_ranks(source, ranks), compiled(source)
    made, wanted = (together(kind, source, programs, CHUNKS) for kind in ("cpu", "reference"))
    alone = executable("cpu", source, entire)
    logits, (_, whole) = steps(alone, CHUNKS), (None, slots(alone))
    assert np.abs(made[0][0] - logits).max() < 2e-3 * np.abs(logits).max()
    model = registry.config_of(config)
    sizes = (model.value_heads, model.key_heads, model.value_dim)
    parts = divide_value_heads(*sizes, 1, ranks, model.tiled)
    for rank, (heads, (rows, state), (slow_rows, slow_state)) in enumerate(zip(parts, made, wanted, strict=True)):
        assert rows.tobytes() == made[0][0].tobytes() == slow_rows.tobytes()
        for slot in (5, 2):
            assert state[slot].tobytes() == slow_state[slot].tobytes()
            # What the first layer reads is the same on all ranks as in one process: so is what it keeps.
            mine, theirs = first_layer(programs[rank], state[slot]), first_layer(entire, whole[slot])
            assert mine[MATRIX].tobytes() == theirs[MATRIX][slice(*heads.heads)].tobytes()
            columns = [
                np.arange(*(edge * model.key_dim for edge in heads.kv_heads)) + at for at in (0, model.key_width)
            ]
            columns.append(np.arange(*(edge * model.value_dim for edge in heads.heads)) + 2 * model.key_width)
            assert mine[COLUMNS].tobytes() == theirs[COLUMNS][:, np.concatenate(columns)].tobytes()


@pytest.mark.parametrize("name", SCANS)
def test_ranks_have_the_state_of_their_heads_and_groups_of_a_scan(name: str) -> None:
    config, ranks, heads_by_rank, groups_by_rank = SCANS[name]
    source = source_of(config)
    programs, entire = of_ranks(source, ranks), compiled(source)
    made, wanted = (together(kind, source, programs, CHUNKS) for kind in ("cpu", "reference"))
    alone = executable("cpu", source, entire)
    logits, (_, whole) = steps(alone, CHUNKS), (None, slots(alone))
    assert np.abs(made[0][0] - logits).max() < 2e-3 * np.abs(logits).max()
    model = registry.config_of(config)
    heads = getattr(model, "scan_heads", model.inner)
    for rank, ((rows, state), (slow_rows, slow_state)) in enumerate(zip(made, wanted, strict=True)):
        assert rows.tobytes() == made[0][0].tobytes() == slow_rows.tobytes()
        first, last = (edge * (model.inner // heads) for edge in heads_by_rank[rank])
        columns = [np.arange(first, last)]
        if heads < model.inner:
            begin, end = (edge * model.states for edge in groups_by_rank[rank])
            columns += [np.arange(begin, end) + model.inner + at * model.groups * model.states for at in range(2)]
        for slot in (5, 2):
            assert state[slot].tobytes() == slow_state[slot].tobytes()
            mine, theirs = first_layer(programs[rank], state[slot]), first_layer(entire, whole[slot])
            assert mine[COLUMNS].tobytes() == theirs[COLUMNS][:, np.concatenate(columns)].tobytes()
            if heads < model.inner:
                assert mine[MATRIX].tobytes() == theirs[MATRIX][slice(*heads_by_rank[rank])].tobytes()
            else:  # B, C and steps are sums over the ranks
                np.testing.assert_allclose(mine[MATRIX], theirs[MATRIX][:, first:last], rtol=2e-3, atol=1e-5)


QUANTISED = {
    "mamba, norms": FAMILIES["mamba, norms"] | {"rank": 32},
    "mamba2": FAMILIES["mamba2"],
    "mamba2, groups": FAMILIES["mamba2, groups"],
    # Its scan and its attention read the same integers, and make others in between.
    "falcon_h1": FAMILIES["falcon_h1"],
    "falcon_h1, parts": FAMILIES["falcon_h1, parts"] | {"scan_norm": "before"},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", QUANTISED)
def test_chunks_and_neighbours_change_no_bit_of_quantised_scans(name: str, form: str, ranks: int) -> None:
    source = random_checkpoint(QUANTISED[name], 3, form)
    programs = of_ranks(source, ranks)
    whole, chunked = (together("cpu", source, programs, steps)[0][0] for steps in (WHOLE, CHUNKS))
    assert np.concatenate([chunked[:17], chunked[17:39], chunked[39:]]).tobytes() == whole.tobytes()
    assert whole.tobytes() == together("reference", source, programs, WHOLE)[0][0].tobytes()


@pytest.mark.parametrize(
    ("name", "form", "fields"), [("qwen3.5", "Q4_0", {}), ("qwen3-next", "Q8_0", {"shared_ffn": 64})]
)
def test_chunks_and_neighbours_change_no_bit_of_quantised_models(name: str, form: str, fields: dict[str, Any]) -> None:
    source = checkpoint(name, form, value_dim=32, layers=3, recurrent=[True, False, True], **fields)
    programs = of_ranks(source, 2)
    whole, chunked = (together("cpu", source, programs, steps)[0][0] for steps in (WHOLE, CHUNKS))
    assert np.concatenate([chunked[:17], chunked[17:39], chunked[39:]]).tobytes() == whole.tobytes()


def staged_steps(stages: list[Any]) -> np.ndarray:
    """Return the logits of CHUNKS, float32 [rows, vocab], through stages that hand rows on."""
    rows = []
    for segments, wanted in CHUNKS:
        carried: dict[str, Any] = {}
        for stage in stages:
            stage.batch.fill(segments, wanted)
            carried = {stage.program.logits: stage.run(carried)}
        rows.append(next(iter(carried.values())).numpy())
    return np.concatenate(rows)


def test_stages_have_the_bits_of_one_process_though_one_keeps_no_state() -> None:
    """Layers of state, attention, state: a stage has both kinds, one has no cache, and of three stages one no state."""
    source = source_of(FAMILIES["qwen3_5"])
    alone = steps(executable("reference", source), CHUNKS)
    for stages in (2, 3):
        parts = [compiled(source, Share(0, 1, number, stages)) for number in range(stages)]
        made = [executable("reference", source, part) for part in parts]
        assert staged_steps(made).tobytes() == alone.tobytes()
        assert [stage.slot_bytes > 0 for stage in made] == [True, stages == 2, True][:stages]


@pytest.mark.parametrize("name", ["mamba", "nemotron_h", "falcon_h1, parts", "lfm2, a convolution last"])
def test_stages_of_ranks_have_the_bits_of_ranks(name: str) -> None:
    source = source_of(FAMILIES[name])

    def staged(member: Member) -> np.ndarray:
        parts = [compiled(source, Share(member.rank, 2, number, 2)) for number in range(2)]
        return staged_steps([executable("reference", source, part, member) for part in parts])

    alone = together("reference", source, of_ranks(source, 2), CHUNKS)[0][0]
    assert all(rows.tobytes() == alone.tobytes() for rows in Threads(2).run(staged))


def test_more_ranks_than_value_heads_and_blocks_that_hold_them_together_are_refused() -> None:
    narrow = {**PUBLISHED["qwen3.5"], "heads": 8, "value_heads": 4, "value_dim": 64}
    with pytest.raises(CapacityError, match=r"tensor_parallel=8 needs 8 parts of 1 value heads, 4 are available"):
        compiled(source_of(narrow), Share(0, 8))
    with pytest.raises(CapacityError, match=r"tensor_parallel=8 needs 8 parts of 1 heads of the scan, 6 are available"):
        compiled(source_of(FAMILIES["mamba2"]), Share(0, 8))
    with pytest.raises(CapacityError, match=r"needs 5 units of 32 columns in the channels of a scan, 4 are available"):
        compiled(source_of(FAMILIES["mamba"]), Share(0, 5))
    blocks = checkpoint("qwen3.5", "Q8_0", value_dim=8)
    with pytest.raises(CapacityError, match=r"parts of 4 value heads \(blocks of 32 columns stay whole\), 1 are"):
        compiled(blocks, Share(0, 2))
