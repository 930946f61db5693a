"""`roofline profile`: the time of each op of a step beside the bytes it must move and the FLOPs it must compute.

A step is one `forward` and one `sample`, as the engine runs them. Steps that take the time of every op alternate with
steps that do not, and of each the fastest eighth counts; the roofs are measured in the same process, in between.

On a GPU ops are timed on the device, and whole steps on the host: from filling the batch's fields to the ids.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from roofline import bundle
from roofline.backends.base import Executable, MeasuresRoofs, TimesOps
from roofline.backends.options import LoadOptions
from roofline.backends.sampling import SampleRows
from roofline.bench.workloads import token_ids
from roofline.common.errors import CapacityError, UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.hardware.roofs import Roofs, highest, reachable
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, Segment, StateMove
from roofline.program.overview import OpLabel, labels
from roofline.program.passes.price import Work, amount, mixture, price, seconds, step_work, with_experts
from roofline.program.target import GPU

if TYPE_CHECKING:
    from roofline.program.ir import Program

MIB = 1 << 20
LATENCY = 1e-6  # seconds: an op that would need less at the roof is bound by its start and its barrier
ROUNDS, BUDGET = 3, 1.0  # the roofs are measured before each round of runs and at the end; seconds of all rounds
PAUSE = 0.5  # seconds, times the tries before: until roofs that were too low are measured again
LEAST_RUNS, MOST_RUNS = 2, 70  # in a round, with clocks and without


@dataclass(frozen=True)
class ProfiledStep:
    """`batch` sequences, each with `tokens` new tokens after `context` cached ones, and one row of logits each."""

    tokens: int
    context: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        many = f"{self.batch} x " if self.batch > 1 else ""
        if self.tokens == 1:
            return f"decode {many}1 token after {self.context:,} in the cache"
        return f"prefill {many}{self.tokens:,} tokens"

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return -(-(self.context + self.tokens) // PAGE_TOKENS)

    def work(self, windows: Sequence[int] = ()) -> Work:
        """The step's size for prices; windows: of the Program's attentions."""
        return step_work(self.tokens * self.batch, self.batch, [(self.context, self.tokens)] * self.batch, windows)


@dataclass(frozen=True)
class Timing:
    """One run of a step with clocks. ops: seconds of each instruction; sample: of sampling; total: of everything."""

    ops: Sequence[float]
    sample: float
    total: float


@dataclass(frozen=True)
class OpTime:
    """One kind of op over all layers. Sums over `calls` instructions: seconds, FLOPs, bytes, least seconds at the roof.

    bound: what its roof is: "memory", "int8", "bf16", "f32"; or "latency" where a call has too little work for any.
    """

    section: str
    op: str
    shape: str
    format: str
    calls: int
    seconds: float
    flops: int
    weight_bytes: int
    kv_bytes: int
    act_bytes: int
    limit_seconds: float
    bound: str

    @property
    def share(self) -> float:
        """Of the roof."""
        return self.limit_seconds / self.seconds if self.seconds else 0.0

    @property
    def read_bytes(self) -> int:
        """Weights and KV, as `roofline show` counts them."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of weights, KV and activations."""
        return self.flops / max(1, self.read_bytes + self.act_bytes)


@dataclass(frozen=True)
class Profile:
    """A step's figures.

    ops: kinds in the order they run, sampling last; step_seconds: mean of the fastest runs without clocks;
    timed_seconds: of those with clocks, where the ops' times come from (on a device the same as step_seconds);
    on_device: timed there; limit_seconds: all ops at their roofs;
    working_set: bytes of weights and KV; roofs: measured beside.
    """

    step: ProfiledStep
    ops: tuple[OpTime, ...]
    step_seconds: float
    timed_seconds: float
    runs: int
    working_set: int
    roofs: Roofs
    on_device: bool = False

    @property
    def limit_seconds(self) -> float:
        return sum(op.limit_seconds for op in self.ops)

    @property
    def share(self) -> float:
        """Of the roof: all ops at their own roofs / the step without clocks."""
        return self.limit_seconds / self.step_seconds

    @property
    def highest_share(self) -> float:
        """Of the roof: of an op, or of the step."""
        return max(self.share, *(op.share for op in self.ops))

    @property
    def unexplained_seconds(self) -> float:
        """What the timed run took outside of its ops: starting threads, planning the step, Python; on a device gaps
        between ops, and less than nothing where its graphs are faster than the list that is timed."""
        return self.timed_seconds - sum(op.seconds for op in self.ops)

    @property
    def explained(self) -> float:
        """Share of the timed run that lies inside ops."""
        return 1 - self.unexplained_seconds / self.timed_seconds

    @property
    def clock_cost(self) -> float:
        """How much slower the run with clocks was, as a share of the step."""
        return self.timed_seconds / self.step_seconds - 1


def counted(runs: int) -> int:
    """How many of the fastest runs count. The single fastest may have met a moment that the roofs' runs did not."""
    return max(1, runs // 8)


def fastest(timings: Sequence[Timing]) -> Timing:
    """The mean of the fastest runs."""
    best = sorted(timings, key=lambda timing: timing.total)[: counted(len(timings))]
    count = len(best)
    ops = [sum(parts) / count for parts in zip(*(timing.ops for timing in best), strict=True)]
    return Timing(ops, sum(t.sample for t in best) / count, sum(t.total for t in best) / count)


def working_set(program: "Program", step: ProfiledStep) -> int:
    """Bytes of weights and KV that a step touches."""
    priced = price(program)
    work = with_experts(step.work(priced.windows), mixture(program))
    return priced.weight_bytes + priced.amount(work).kv_bytes


def _sampling(spent_seconds: float, vocab: int, rows: int) -> OpTime:
    """Return the row of sampling, which reads the logits that the head has just written."""
    return OpTime(
        section="head",
        op="sample",
        shape=str(vocab),
        format="f32",
        calls=1,
        seconds=spent_seconds,
        flops=0,
        weight_bytes=0,
        kv_bytes=0,
        act_bytes=4 * vocab * rows,
        limit_seconds=0.0,
        bound="latency",
    )


def summarise(
    program: "Program", step: ProfiledStep, timings: Sequence[Timing], plain: Sequence[float], roofs: Roofs
) -> Profile:
    """The figures of a step from its runs with clocks and its runs without (seconds each)."""
    best = fastest(timings)
    untimed = sorted(plain)[: counted(len(plain))]
    priced = price(program)
    work = with_experts(step.work(priced.windows), mixture(program))
    names, touched = _merged(program, step), working_set(program, step)
    reads = roofs.read_bytes_per_s(touched)
    kinds: dict[tuple[str, ...], list[OpTime]] = {}
    for (instr, cost), rate, label, spent_seconds in zip(priced.instrs, priced.rates, names, best.ops, strict=True):
        spent = amount(cost, work.of(instr))
        limit = seconds(instr, spent, roofs, touched, rate)
        moves = (spent.weight_bytes + spent.kv_bytes) / reads >= limit
        section = "head" if label.section == "head" else "embed" if label.section == "embed" else "layers"
        key = section, label.op, label.shape, label.format
        bound = "memory" if moves else rate[0].partition("_")[0]
        call = OpTime(
            section=section,
            op=label.op,
            shape=label.shape,
            format=label.format,
            calls=int(instr.op == label.op),
            seconds=spent_seconds,
            flops=spent.flops,
            weight_bytes=spent.weight_bytes,
            kv_bytes=spent.kv_bytes,
            act_bytes=spent.act_bytes,
            limit_seconds=limit,
            bound=bound,
        )
        kinds.setdefault(key, []).append(call)
    ops = [_total(calls) for calls in kinds.values()]
    ops.append(_sampling(best.sample, program.types()[program.logits].width, work.rows))
    step_seconds, on_device = sum(untimed) / len(untimed), program.target == GPU.name
    if not on_device:
        step_seconds = min(step_seconds, best.total)  # clocks can only slow a step: the rest is noise
    timed, runs = step_seconds if on_device else best.total, len(plain) + len(timings)
    return Profile(
        step=step,
        ops=tuple(ops),
        step_seconds=step_seconds,
        timed_seconds=timed,
        runs=runs,
        working_set=touched,
        roofs=roofs,
        on_device=on_device,
    )


def _merged(program: "Program", step: ProfiledStep) -> list[OpLabel]:
    """Labels of the instructions. In decode steps on a CPU `attend` also writes the cache: the write has its label."""
    names = list(labels(program))
    if step.tokens == 1 and program.target != GPU.name:
        for at, instr in enumerate(program.body):
            if any(value.type.dtype == "cache" for value in instr.outputs):
                names[at] = names[at + 1]
    return names


def _total(calls: Sequence[OpTime]) -> OpTime:
    """The sums over calls of one kind of op. Its bound is that of the call with most to do."""
    longest = max(calls, key=lambda call: call.limit_seconds)
    names = ("calls", "seconds", "flops", "weight_bytes", "kv_bytes", "act_bytes", "limit_seconds")
    sums = {name: sum(getattr(call, name) for call in calls) for name in names}
    return replace(longest, **sums, bound=longest.bound if longest.limit_seconds >= LATENCY else "latency")


@runtime_checkable
class Profilable(Executable, TimesOps, MeasuresRoofs, Protocol):
    """An executable that `profile_step` takes: those of the cpu and gpu backends."""


def fill(executable: Executable, step: ProfiledStep) -> None:
    """Put the step into the batch buffer after computing its context, so that attention reads a filled cache."""
    vocab = min(30000, executable.vocab_size)
    ids = [token_ids(step.context + step.tokens, seed, vocab) for seed in range(step.batch)]
    pages = [range(i * step.pages, (i + 1) * step.pages) for i in range(step.batch)]
    for slot, (mine, owned) in enumerate(zip(ids, pages, strict=True)):
        for first in range(0, step.context, executable.limits.tokens):
            chunk = mine[first : min(first + executable.limits.tokens, step.context)]
            move = StateMove(slot if first else NO_SLOT, slot) if executable.limits.state_slots else None
            executable.batch.fill([Segment(chunk, first, owned, state=move)], [])
            executable.forward()
    segments = [Segment(mine[step.context :], step.context, owned) for mine, owned in zip(ids, pages, strict=True)]
    executable.batch.fill(segments, [step.tokens * (i + 1) - 1 for i in range(step.batch)])


def profile_step(executable: Profilable, step: ProfiledStep, budget: float = BUDGET) -> Profile:
    """Run a step with clocks and without, in turn, and measure the roofs in between; see `hardware.roofs.reachable`
    where a share of them is above 100 %."""
    sizes = sorted({MIB, working_set(executable.program, step)})  # what a core's own cache holds, and the step's

    def measured() -> Roofs:
        return executable.measure_roofs(sizes)

    fill(executable, step)
    timings: list[Timing] = []
    plain: list[float] = []
    roofs = measured()
    for part in range(1, ROUNDS + 1):
        run(executable, step, False), run(executable, step, True)  # the roofs' reads have emptied the caches
        until = time.perf_counter() + budget / ROUNDS
        while len(plain) < LEAST_RUNS * part or (len(plain) < MOST_RUNS * part and time.perf_counter() < until):
            plain.append(run(executable, step, False).total)
            timings.append(run(executable, step, True))
        roofs = highest(roofs, measured())
    summary = partial(summarise, executable.program, step, timings, plain)

    def later() -> Roofs:
        time.sleep(PAUSE)  # what keeps the machine busy may have ended by then
        return measured()

    return summary(reachable(roofs, lambda roofs: summary(roofs).highest_share, later))


def run(executable: Profilable, step: ProfiledStep, clocks: bool) -> Timing:
    """The step in the batch buffer once: forward and greedy sampling."""
    rows = SampleRows.greedy(step.batch)
    executable.clocks(clocks)
    began = time.perf_counter()
    executable.forward()
    middle = time.perf_counter()
    executable.sample(rows)
    end = time.perf_counter()
    executable.clocks(False)
    ops = executable.op_seconds() if clocks else ()
    on_device = clocks and executable.program.target == GPU.name  # where forward with clocks runs more than the step
    return Timing(ops, end - middle, sum(ops) + end - middle if on_device else end - began)


@dataclass(frozen=True)
class Profiled:
    """Profiles of a model. chosen: isa and threads, or the device, with the reason of each choice."""

    model: str
    chosen: dict[str, str]
    profiles: tuple[Profile, ...]


def profile_model(model: str, steps: Sequence[ProfiledStep], load: LoadOptions = LoadOptions()) -> "Profiled":
    """Load `model`, as large as the steps need, and profile steps of it.

    Raises as `load` and `profile_step`.
    """
    load = replace(
        load,
        cache_tokens=max(step.pages * step.batch for step in steps) * PAGE_TOKENS,
        max_batch_tokens=max(512, *(step.tokens * step.batch for step in steps)),
        max_running=max(step.batch for step in steps),
    )
    loaded = bundle.load(model, load, text=False)
    try:
        longest = loaded.executable.max_context
        for step in steps:
            if step.context + step.tokens > longest:
                remedy = "Choose a shorter --decode or --prefill."
                raise CapacityError(step.name, step.context + step.tokens, longest, "positions of the model", remedy)
        if not isinstance(loaded.executable, Profilable):
            instead = ("backend=cpu", "backend=gpu")
            raise UnsupportedError("profiling with this backend", "it does not time ops", instead)
        profiles = [profile_step(loaded.executable, step) for step in steps]
    finally:
        loaded.executable.close()
    return Profiled(loaded.name, dict(loaded.notes), tuple(profiles))


def record(profiled: Profiled) -> JsonObject:
    """Everything as plain values, for JSON. Times in seconds, rates per second."""

    def op(row: OpTime) -> JsonObject:
        return {**asdict(row), "share_of_roof": row.share, "intensity": row.intensity}

    return {
        "model": profiled.model,
        "chosen": profiled.chosen,
        "steps": [
            {
                "name": p.step.name,
                **asdict(p.step),
                "seconds": p.step_seconds,
                "timed_seconds": p.timed_seconds,
                "on_device": p.on_device,
                "clock_cost": p.clock_cost,
                "explained": p.explained,
                "unexplained_seconds": p.unexplained_seconds,
                "limit_seconds": p.limit_seconds,
                "share_of_roof": p.share,
                "working_set": p.working_set,
                "roofs": asdict(p.roofs),
                "read_bytes": sum(row.read_bytes for row in p.ops),
                "flops": sum(row.flops for row in p.ops),
                "runs": p.runs,
                "ops": [op(row) for row in p.ops],
            }
            for p in profiled.profiles
        ],
    }
