"""plan: a place in one arena for every value, reused after its last reader; the peak is known before anything runs.

The arena is two regions: values per token, then values per logit row. Inside a region every offset is a number of bytes
per token (per row), a multiple of 64, so no two live values overlap whatever the step's size, and all start 64-aligned.
"""

from dataclasses import replace

from roofline.ops.cost import Affine
from roofline.ops.registry import get
from roofline.ops.traits import Trait
from roofline.program.ir import HIDDEN, SYMBOLS, ArenaPlace, ArenaPlan, Instr, Program

ALIGN = 64


def plan(program: Program) -> Program:
    """The Program with its Plan. Views (split) lie inside what they view; in-place ops take over a dying operand."""
    types, last, viewed = program.types(), _last_use(program), _views(program)
    regions = {symbol: _Region() for symbol in SYMBOLS}
    slot: dict[str, tuple[int, int]] = {}  # value -> (bytes per unit of its symbol, columns' bytes into the row)
    stride: dict[str, int] = {}
    for value in program.inputs:
        if value.name == HIDDEN:
            size = -(-value.type.row_bytes // ALIGN) * ALIGN
            slot[HIDDEN], stride[HIDDEN] = (regions["tokens"].take(size), 0), value.type.row_bytes
            regions["tokens"].hold(0, size, last[HIDDEN])
    for at, instr in enumerate(program.body):
        # Operands that die here are freed after the results have their places: no kernel reads what it overwrites.
        reused = _taken_over(instr, slot, last, at, viewed)
        for value in instr.outputs:
            kind = value.type
            if kind.stored:
                continue
            if instr.has(Trait.VIEW):
                base, column = slot[instr.inputs[0]]
                slot[value.name] = base, column + instr.attr("start") * kind.row_bytes // kind.width
                stride[value.name] = stride[instr.inputs[0]]
                continue
            stride[value.name] = kind.row_bytes
            region = regions[str(kind.leading)]
            size = -(-kind.row_bytes // ALIGN) * ALIGN
            slot[value.name] = (slot[reused][0], 0) if reused else (region.take(size), 0)
            reused = ""  # by the first result alone
            region.hold(slot[value.name][0], size, last.get(value.name, at))
        for region in regions.values():
            region.free_until(at)
    tokens = Affine(tokens=regions["tokens"].peak)
    bases = {"tokens": Affine(), "rows": tokens}
    places = {}
    for name, (unit, column) in slot.items():
        leading = str(types[name].leading)
        places[name] = ArenaPlace(bases[leading] + Affine.per(leading, unit) + Affine(const=column), stride[name])
    return replace(program, plan=ArenaPlan(places, tokens + Affine(rows=regions["rows"].peak)))


def _last_use(program: Program) -> dict[str, int]:
    """Value -> index of its last reader; a view keeps what it views alive."""
    last: dict[str, int] = {}
    for at in range(len(program.body) - 1, -1, -1):
        instr = program.body[at]
        for name in instr.inputs:
            last.setdefault(name, at)
            if instr.has(Trait.VIEW):
                last[name] = max(last[name], last.get(instr.output.name, at))
    for name in program.outputs:
        last[name] = len(program.body)
    return last


def _views(program: Program) -> set[str]:
    """The names of views and of what they view."""
    views = [instr for instr in program.body if instr.has(Trait.VIEW)]
    return {name for instr in views for name in (instr.inputs[0], instr.output.name)}


def _taken_over(instr: Instr, slot: dict[str, tuple[int, int]], last: dict[str, int], at: int, viewed: set[str]) -> str:
    """The operand whose buffer the result may take over, or "": it dies here, is no view, and nothing views it."""
    op = get(instr.op)
    if op.inplace is None:
        return ""
    name = instr.inputs[op.values.index(op.inplace)]
    read_twice = instr.inputs.count(name) > 1
    return name if name in slot and last[name] == at and name not in viewed and not read_twice else ""


class _Region:
    """First-fit over bytes per unit of one symbol."""

    def __init__(self) -> None:
        self.live: list[tuple[int, int, int]] = []  # (start, size, index of the last reader)
        self.peak = 0

    def take(self, size: int) -> int:
        """The lowest start with `size` free bytes."""
        start = 0
        for other, length, _ in sorted(self.live):
            if start + size <= other:
                break
            start = max(start, other + length)
        return start

    def hold(self, start: int, size: int, until: int) -> None:
        self.live.append((start, size, until))
        self.peak = max(self.peak, start + size)

    def free_until(self, at: int) -> None:
        self.live = [entry for entry in self.live if entry[2] > at]
