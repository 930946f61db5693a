"""How ranks divide a selective scan: heads with the groups they read, or channels where each has rates of its own.

B and C of a group go to all ranks that have heads of it. What is normed by groups behind the scan is gathered first
where a group's heads are on several ranks.
"""

from dataclasses import dataclass

from roofline.ops.symbol import Type
from roofline.program.ir import Instr, Program
from roofline.program.passes.cuts import Cut, head_columns
from roofline.program.passes.divide import Heads, Range, divide_columns, divide_heads


@dataclass(frozen=True)
class ScanParts:
    """The division of all scans of a Program, which are alike.

    by_rank: heads, and as `kv_heads` the groups they read; dim: channels of a head; groups, states: of the whole scan.
    """

    by_rank: tuple[Heads, ...]
    dim: int
    groups: int
    states: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Count the channels of each rank."""
        return tuple((part.heads[1] - part.heads[0]) * self.dim for part in self.by_rank)

    def channels(self, rank: int) -> Range:
        """Return the columns of x that a rank has."""
        return head_columns(self.by_rank[rank].heads, self.dim)

    def joined(self, rank: int) -> Cut:
        """Return the columns that a rank has of x, B and C, which lie side by side."""
        width, count = sum(self.widths), self.groups * self.states
        first, last = head_columns(self.by_rank[rank].kv_heads, self.states)
        begins = width, width + count
        return (self.channels(rank), *((begin + first, begin + last) for begin in begins))


def scans_of(program: Program) -> list[Instr]:
    """List the selective scans of a Program."""
    return [instr for instr in program.body if instr.op == "selective_scan"]


def has_rates(program: Program, scan: Instr) -> bool:
    """Say whether a scan has a rate for each state of each channel."""
    return len(program.weights[scan.weights[0]].shape) == 2


def scan_inputs(program: Program) -> set[str]:
    """Name the x of scans whose B and C are made of it, and joined to it."""
    maker_of = {value.name: instr for instr in program.body for value in instr.outputs}
    joins = (maker_of.get(scan.inputs[0]) for scan in scans_of(program) if has_rates(program, scan))
    return {join.inputs[0] for join in joins if join is not None and join.op == "join_heads"}


def divide_scans(program: Program, types: dict[str, Type], block: int, ranks: int) -> ScanParts | None:
    """Divide the scans of a Program among ranks; None: it has none.

    block: columns that the matrices which read channels have in a block. Raises CapacityError where there are fewer
    parts than ranks.
    """
    if not scans_of(program):
        return None
    ((width, heads, groups, states, rates),) = {_sizes(program, types, scan) for scan in scans_of(program)}
    if rates:
        ranges = divide_columns(width, block, ranks, "the channels of a scan")
        return ScanParts(tuple(Heads(channels, (0, 1)) for channels in ranges), 1, groups, states)
    parts = divide_heads(heads, groups, width // heads, block, ranks, "heads of the scan")
    return ScanParts(tuple(parts), width // heads, groups, states)


def _sizes(program: Program, types: dict[str, Type], scan: Instr) -> tuple[int, int, int, int, bool]:
    heads = types[scan.inputs[1]].width
    return scan.output.type.width, heads, int(scan.attr("groups")), int(scan.attr("states")), has_rates(program, scan)
