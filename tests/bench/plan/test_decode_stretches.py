"""Closed loops that take decode steps without the scheduler, against those that take each step with it."""

import functools
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from roofline.backends.capacity import Capacity
from roofline.backends.fit import split_on_product
from roofline.backends.simulated.calibration import Calibration
from roofline.backends.simulated.executable import SimulatedExecutable
from roofline.backends.simulated.step_times import SimulatedStepTimes
from roofline.bench.plan.closed_loop import ClosedLoop, Lengths, Run
from roofline.bench.plan.plan import shape_of
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.hardware.chips.products import sheet_roofs, titled
from roofline.ops.batch import Batch, BatchLimits

LENGTHS = st.builds(Lengths, prompt=st.integers(1, 90), answer=st.integers(1, 70))


@functools.cache
def step_times() -> SimulatedStepTimes:
    chip = titled("MI300X")
    program = split_on_product(*shape_of("gemma-2-2b", ""), chip, 1).parts[0].program  # whose windows differ
    roofs = sheet_roofs(chip)
    assert roofs is not None
    return SimulatedStepTimes([program], roofs, Calibration(reads=0.61, arithmetic=0.47, row_seconds=1e-6))


def looped(
    lengths: list[Lengths], concurrency: int, step: tuple[int, int], pages: int, skips: bool
) -> tuple[Run, list[tuple[int, ...]], int, int]:
    """A run, the sizes of its steps, pages in use at its end, and how many steps the engine took."""
    tokens, running = step
    limits = BatchLimits(tokens=max(tokens, running), segments=running, rows=running, pages=running * 10)
    executable = SimulatedExecutable(step_times(), Capacity(limits, 160, pages), 1, 1000, "a model")
    steps: list[tuple[int, ...]] = []

    def watch(batch: Batch, seconds: float) -> None:
        context = batch.context_len[: batch.segments].tolist()
        steps.append((batch.tokens, batch.rows, *context))

    executable.watch = watch
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False, overlap=False))
    with mock.patch.object(engine, "step", wraps=engine.step) as step_of_engine:
        run = ClosedLoop(engine, lengths, concurrency, 3, skips=skips).run()
    return run, steps, engine.state.cache.used, step_of_engine.call_count


@settings(max_examples=8, deadline=None)
@example([Lengths(33, 40)], 6, (64, 4), 12)  # pages run out, and some wait for them
@example([Lengths(33, 40), Lengths(64, 64)], 3, (32, 3), 400)  # the last token of a prompt is a step of its own
@given(
    st.lists(LENGTHS, min_size=1, max_size=4),
    st.integers(1, 9),
    st.tuples(st.integers(4, 100), st.integers(1, 5)),
    st.integers(10, 40),
)
def test_no_figure_depends_on_whether_decode_steps_are_skipped(
    lengths: list[Lengths], concurrency: int, step: tuple[int, int], pages: int
) -> None:
    skipping = looped(lengths, concurrency, step, pages, skips=True)
    stepping = looped(lengths, concurrency, step, pages, skips=False)
    assert skipping[:3] == stepping[:3]


def test_steps_that_only_decode_are_skipped() -> None:
    load = [Lengths(30, 60)], 4, (64, 4), 100
    assert looped(*load, skips=True)[3] * 4 < looped(*load, skips=False)[3]
    short_of_pages = [Lengths(60, 60)], 6, (64, 6), 14
    assert looped(*short_of_pages, skips=True)[3] * 2 < looped(*short_of_pages, skips=False)[3]
