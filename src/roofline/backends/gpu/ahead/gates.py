"""What a compiled kernel must be like, and where it is not: which figure, what was allowed, what to do. gates.toml."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from roofline.backends.gpu.ahead.binary_facts import Facts
from roofline.backends.gpu.signatures import Compilation
from roofline.backends.gpu.tiles import Row
from roofline.common.errors import ConfigError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.chips.occupancy import Occupancy, occupancy

_SMALLER = "give the kernel a smaller tile or more warps on this chip in tiles.toml"


@dataclass(frozen=True)
class GateViolation:
    """gate: "compiles", "spills", "stack", "local memory", "occupancy", "dots", "matrix" or "specialised";
    figure, allowed: in words; remedy: what to do about it."""

    kernel: str
    case: str
    chip: str
    gate: str
    figure: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.kernel} [{self.case}] on {self.chip}"
        return f"{where}: {self.gate}: {self.figure}; allowed: {self.allowed}. To do: {self.remedy}."


def check(compilation: Compilation, facts: Facts, chip: Chip) -> tuple[GateViolation, ...]:
    """Every gate that the binary does not pass."""
    gates = (_spills, _stack, _local, _occupancy, _dots, _matrix, _specialised)
    violations = (violation for gate in gates for violation in gate(compilation, facts, chip))
    return tuple(GateViolation(compilation.kernel, compilation.case, chip.name, *violation) for violation in violations)


def row(section: str, compilation: Compilation, chip: Chip) -> Row:
    """The first row of a section that fits; {} where none does."""
    return next(_fitting(section, compilation, chip), {})


def reached(facts: Facts, chip: Chip) -> Occupancy | None:
    """Programs and waves by registers and local memory; None where not one program fits."""
    try:
        return occupancy(chip, facts.registers, facts.warps, facts.local_bytes)
    except ConfigError:
        return None


Gate = Iterator[tuple[str, str, str, str]]  # gate, figure, allowed, remedy of what is violated


def _spills(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    unit = "registers" if chip.vendor == "amd" else "bytes stored and loaded"
    allowed = row("spills", compilation, chip).get("allowed", 0)
    if facts.spills > allowed:
        yield "spills", f"{facts.spills} {unit}", str(allowed), f"{_SMALLER}, or a budget with its reason in gates.toml"


def _stack(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    if facts.stack_bytes and not facts.spills:  # spills lie there too
        remedy = "look for what the kernel indexes by a variable: registers cannot be"
        yield "stack", f"{facts.stack_bytes} bytes of memory for each thread", "0", remedy


def _local(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    if facts.local_bytes > chip.local_bytes:
        remedy = "give the kernel a smaller tile or fewer stages on this chip in tiles.toml"
        yield "local memory", f"{facts.local_bytes:,} bytes", f"{chip.local_bytes:,}", remedy


def _occupancy(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    required = row("occupancy", compilation, chip)["waves"]
    there = reached(facts, chip)
    if facts.local_bytes > chip.local_bytes:  # has a gate of its own
        return
    if there is None or there.waves < required:
        figure = f"{there.waves:g} waves on each SIMD, bound by {there.bound}," if there else "not one program fits"
        figure += f" with {facts.registers} registers a thread and {facts.local_bytes:,} bytes of local memory"
        yield "occupancy", figure, f"at least {required} waves on each SIMD", _SMALLER


def _dots(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    if bool(facts.dots) != compilation.dots:
        figure = f"{sum(facts.dots.values())} products of tiles (tl.dot)"
        required = "at least one" if compilation.dots else "none"
        yield "dots", figure, required, "make `dots` of its compilation say what the kernel does"


def _matrix(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    without = {
        operand
        for row in _rows()["no_matrix"]
        if chip.name.startswith(tuple(row["chips"]))
        for operand in row["operands"]
    }
    expected = {operand: count for operand, count in facts.dots.items() if operand not in without}
    plain = {operand: count for operand, count in facts.plain_dots.items() if operand in expected}
    remedy = "make the tile a multiple of the instruction's shape (16 x 16 x 16 at least), of a dtype the chip has"
    if expected and not facts.matrix:
        yield "matrix", f"none of {chip.matrix} in the assembly", f"at least one for {_words(expected)}", remedy
    elif plain:
        yield "matrix", f"ordinary multiplications for {_words(plain)}", "matrix instructions only", remedy


def _specialised(compilation: Compilation, facts: Facts, chip: Chip) -> Gate:
    """Triton compiles anew for an integer that is 1, a multiple of 16, or neither, unless it is told not to."""
    specialised = {param.name for param in compilation.function.params if not param.do_not_specialize}
    numbers = (name for name, kind in compilation.signature.items() if kind in ("i32", "i64"))
    free = [name for name in numbers if name in specialised and name not in compilation.aligned]
    if free:
        remedy = "name them in do_not_specialize of the kernel, or in `aligned` where they are always multiples of 16"
        yield "specialised", f"a binary for each kind of number of {', '.join(free)}", "one for all numbers", remedy


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} product{'s' * (count > 1)} of {operand}" for operand, count in counts.items())


def _fitting(section: str, compilation: Compilation, chip: Chip) -> Iterator[Row]:
    for candidate in _rows().get(section, ()):
        kernels, cases = candidate.get("kernels", (compilation.kernel,)), candidate.get("cases", ("*",))
        if (
            chip.name.startswith(tuple(candidate.get("chips", ("",))))
            and compilation.kernel in kernels
            and any(fnmatchcase(compilation.case, pattern) for pattern in cases)
        ):
            yield candidate


@cache
def _rows() -> dict[str, list[Row]]:
    return tomllib.loads(resources.files("roofline.backends.gpu.ahead").joinpath("gates.toml").read_text("utf-8"))
