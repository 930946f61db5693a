"""Simulated steps that only decode, taken without the scheduler: until the next answer ends, one is like another.

In such a step each running sequence gets a token, and its context is one longer; nobody is admitted, pre-empted or
ended. So the price of the step is all that has to be asked for, and what the scheduler would have noted of these steps
is noted once. Times, figures and pages in use are those of the engine's own steps, in every bit.
"""

from roofline.backends.simulated.executable import FIRST_ID, SimulatedExecutable
from roofline.engine.local import LocalEngine
from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import PAGE_TOKENS, Header

Standing = tuple[list[Sequence], int, int, int]


class DecodeStretches:
    """Takes the decode steps of an engine that come before its next end, where the engine is simulated.

    Its prefix cache is off, it drafts nothing, and its answers end at their length alone. The ids of the tokens that
    are skipped are of no meaning.
    """

    def __init__(self, engine: LocalEngine) -> None:
        executable, config = engine.executable, engine.config
        plain = not config.prefix_cache and (config.scheduler, config.speculate) == ("continuous", "off")
        self._engine = engine
        self._executable = executable if isinstance(executable, SimulatedExecutable) and plain else None
        self._standing: Standing | None = None  # before the engine's last step, where it could only decode

    def skip(self) -> int:
        """Take the steps before the one that ends an answer, and return how many these were; 0 where the next step may
        be another kind."""
        state = self._engine.state
        running = state.running
        decoding = all(len(s.ids) - s.computed == 1 and s.first_at is not None for s in running)
        if self._executable is None or not running or not decoding:
            self._standing = None
            return 0
        if state.waiting and len(running) < state.limits.sequences:
            # Whoever waits was refused pages by the step before, if that changed nothing, and there are no more now.
            before = self._standing
            self._standing = list(running), state.preemptions, state.arrivals, len(state.waiting)
            if self._standing != before:
                return 0
        count = min(s.end - len(s.ids) for s in running) - 1
        while count > 0 and not self._fits(count + 1):
            count //= 2
        if count > 0:
            self._take(count)
        return max(0, count)

    def _fits(self, count: int) -> bool:
        """Whether there are pages for so many steps, and places in the page table."""
        state = self._engine.state
        needed = sum(_pages(sequence, count) for sequence in state.running)
        present = sum(len(sequence.pages) for sequence in state.running)
        return needed <= state.limits.table_pages and needed - present <= state.cache.available

    def _take(self, count: int) -> None:
        engine, executable = self._engine, self._executable
        assert executable is not None, "it is simulated"
        running, batch, clock = engine.state.running, executable.batch, executable.clock
        n = len(running)
        plan = StepPlan(sequences=running, counts=[1] * n, sampled=running, tokens=n, decodes=n)
        batch.header[[Header.TOKENS, Header.SEGMENTS, Header.ROWS]] = n
        context = batch.context_len[:n]
        context[:] = [len(sequence.ids) for sequence in running]
        for step in range(count):
            if step:
                context += 1
            before = clock.now()
            executable.forward()
            cost = executable.step_cost() if engine.config.measure else None
            engine.meter.step(plan, [0] * n, plan.counts, clock.now() - before, 0.0, cost)
        ids = [FIRST_ID] * count
        for sequence in running:
            engine.state.cache.grow(sequence.pages, len(sequence.ids) + count - 1)
            sequence.ids += ids
            sequence.computed += count


def _pages(sequence: Sequence, count: int) -> int:
    """How many pages a sequence has after so many more steps."""
    return max(len(sequence.pages), -(-(len(sequence.ids) + count - 1) // PAGE_TOKENS))
