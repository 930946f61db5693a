"""The static proof: every kernel, compiled for chips that are not here, passes its gates. In processes of their own.

A process of its own because Triton interprets or compiles for a whole process and knows one driver, and because LLVM
ends the process where it cannot go on: one that dies takes with it no more than the compilation it was at.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from roofline.backends.gpu.ahead import kernel_cache, kernel_list
from roofline.backends.gpu.ahead.binary_facts import Facts
from roofline.backends.gpu.ahead.gates import GateViolation
from roofline.backends.gpu.signatures import Compilation
from roofline.common import env
from roofline.common.errors import UnsupportedError
from roofline.hardware import detect
from roofline.hardware.chips import chips
from roofline.hardware.chips.chips import Chip
from roofline.hardware.chips.occupancy import Occupancy

T = TypeVar("T")


@dataclass(frozen=True)
class CompilationTask:
    """One compilation, by the place it has in its module: what another process can be asked for."""

    chip: str
    module: str
    place: int
    kernel: str
    case: str


@dataclass(frozen=True)
class Proof:
    """What came of one compilation. facts: None where it was not compiled; occupancy: None also where no program fits;
    seconds: of processor time, next to nothing where it lay in the cache, though the first in a process also reads all
    of Triton for the key; triton: its version."""

    chip: str
    kernel: str
    case: str
    tile: str
    facts: Facts | None
    occupancy: Occupancy | None
    violations: tuple[GateViolation, ...]
    seconds: float
    triton: str


def prove(
    targets: Sequence[Chip],
    *,
    kernel: str | None = None,
    modules: Sequence[str] | None = None,
    only: Collection[tuple[str, str, str]] | None = None,
    folder: Path | None = None,
    jobs: int | None = None,
) -> Iterator[Proof]:
    """Compile everything for these chips and check it, in the order in which it gets ready.

    kernel: only that one; modules: those that hold kernels, by dotted name, ours if not given; only: no other (chip,
    kernel, case). The binaries stay in `folder`, the kernel cache if none is named; what lies there is not compiled
    again. jobs: processes at a time, usable cores if not given. Raises UnsupportedError where torch or triton is
    missing and for an unknown kernel.
    """
    kernel_list.require_compiler()
    count = jobs or _cores()
    path = str(folder or kernel_cache.folder())
    names = tuple(chip.name for chip in targets)
    with _pool(1) as pool:
        tasks = pool.submit(_tasks, names, None if modules is None else tuple(modules)).result()
    if kernel is not None and kernel not in {task.kernel for task in tasks}:
        kernels = sorted({task.kernel for task in tasks})
        raise UnsupportedError(f"the kernel {kernel!r}", "there is none of that name for these chips", kernels)
    waiting = deque(
        task
        for task in tasks
        if kernel in (None, task.kernel) and (only is None or (task.chip, task.kernel, task.case) in only)
    )
    while waiting:
        suspects: list[CompilationTask] = []
        yield from _until_one_dies(waiting, suspects, path, count)
        for task in suspects:
            yield _alone(task, path)


def elsewhere(call: Callable[[str], T], chip_names: Sequence[str], jobs: int | None = None) -> Iterator[T]:
    """call(chip name) for each, in that order, in processes that compile for chips that are not here.

    Raises what the call raises, and UnsupportedError where torch or triton is missing.
    """
    kernel_list.require_compiler()
    with _pool(jobs or _cores()) as pool:
        yield from pool.map(call, chip_names)


def _cores() -> int:
    return detect.usable_cores(detect.cores_allowed(), detect.cpu_quota())


def _until_one_dies(
    waiting: deque[CompilationTask], suspects: list[CompilationTask], path: str, count: int
) -> Iterator[Proof]:
    """Works `waiting` off; where a process died, `suspects` are what was under way then."""
    running: dict[Future[Proof], CompilationTask] = {}
    with _pool(count) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    running[pool.submit(_prove, waiting[0], path)] = waiting[0]
                    waiting.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    proof = future.result()
                    del running[future]
                    yield proof
        except BrokenProcessPool:
            suspects += running.values()


def _alone(task: CompilationTask, path: str) -> Proof:
    with _pool(1) as pool:
        try:
            return pool.submit(_prove, task, path).result()
        except BrokenProcessPool:
            return _failed(task, "", "the compiler ended its process; its last words are above", 0.0, "")


def _pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_compiling)


def _compiling() -> None:
    """In a new process, before triton is imported: kernels are to be compiled there, whatever is done here."""
    env.forget("TRITON_INTERPRET")


def _tasks(names: tuple[str, ...], modules: tuple[str, ...] | None) -> list[CompilationTask]:
    return [
        CompilationTask(name, module, place, compilation.kernel, compilation.case)
        for name in names
        for module, place, compilation in kernel_list.compilations(chips.get(name), modules)
    ]


def _prove(task: CompilationTask, path: str) -> Proof:
    import triton

    from roofline.backends.gpu.ahead import binary_facts, gates
    from roofline.backends.gpu.ahead.compile import compile_ahead

    kernel_cache.use(Path(path))
    chip = chips.get(task.chip)
    compilation = kernel_list.one(task.module, task.place, chip)
    tile, start = tile_text(compilation), _processor_seconds()
    try:
        facts = binary_facts.read(compile_ahead(compilation, chip), chip)
    except Exception as error:  # whatever a compiler raises is what this kernel cannot do on this chip
        words = f"{type(error).__name__}: {error}".strip().splitlines()
        return _failed(task, tile, " ".join(words[:3]), _processor_seconds() - start, triton.__version__)
    seconds = _processor_seconds() - start
    reached, violations = gates.reached(facts, chip), gates.check(compilation, facts, chip)
    return Proof(
        chip=task.chip,
        kernel=task.kernel,
        case=task.case,
        tile=tile,
        facts=facts,
        occupancy=reached,
        violations=violations,
        seconds=seconds,
        triton=triton.__version__,
    )


def _processor_seconds() -> float:
    """Of this process and of the assemblers it has run: what other processes do does not lengthen it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _failed(task: CompilationTask, tile: str, cause: str, seconds: float, version: str) -> Proof:
    remedy = "change the kernel, or leave this case out of its compilations on this chip and refuse it by name"
    violation = GateViolation(
        kernel=task.kernel,
        case=task.case,
        chip=task.chip,
        gate="compiles",
        figure=cause,
        allowed="a binary",
        remedy=remedy,
    )
    return Proof(
        chip=task.chip,
        kernel=task.kernel,
        case=task.case,
        tile=tile,
        facts=None,
        occupancy=None,
        violations=(violation,),
        seconds=seconds,
        triton=version,
    )


def tile_text(compilation: Compilation) -> str:
    """Sizes, warps, stages and options in one line: "BLOCK_M=64 BLOCK_N=32 4w 2s waves_per_eu=2"."""
    tile = compilation.tile
    sizes, options = ([f"{name}={value}" for name, value in pairs.items()] for pairs in (tile.sizes, tile.options))
    return " ".join([*sizes, f"{tile.warps}w", f"{tile.stages}s", *options])
