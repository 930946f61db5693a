"""One layer of a priced Program as rows of a table: what `roofline show` prints."""

from collections import Counter
from dataclasses import astuple, dataclass, replace

from roofline.hardware.roofs import Roofs
from roofline.ops import formats
from roofline.ops.registry import get
from roofline.ops.symbol import Type
from roofline.program.ir import Instr, Program
from roofline.program.passes.price import Amount, Work, amount, price, seconds, window_of

LAST = "last layer"


@dataclass(frozen=True)
class OpLabel:
    """Where an instruction stands ("embed", "layer 3", "head"), its op, shape, and the formats of what it reads."""

    section: str
    op: str
    shape: str
    format: str


@dataclass(frozen=True)
class OpRow(OpLabel):
    """One op. times: layers that run it; seconds: least time of one run, None without roofs; bound: by what."""

    times: int
    spent: Amount
    seconds: float | None
    bound: str

    @property
    def read_bytes(self) -> int:
        """Weight and KV bytes of one run."""
        return self.spent.weight_bytes + self.spent.kv_bytes


@dataclass(frozen=True)
class Overview:
    """The rows of embed, the first layer, what later ones do besides and the head, one for all that the last layer does
    for wanted rows alone, and the step's totals over all layers."""

    rows: tuple[OpRow, ...]
    layers: int
    weight_bytes: int
    spent: Amount
    seconds: float | None


def overview(program: Program, work: Work, roofs: Roofs | None) -> Overview:
    """The table for one step of size `work`."""
    priced = price(program)
    total = priced.amount(work)
    working_set = priced.weight_bytes + total.kv_bytes
    layers = program.layers
    priced_here = [
        (label, cost, (_like(instr), cost, window_of(instr)))
        for (instr, cost), label in zip(priced.instrs, labels(program), strict=True)
    ]
    inner = Counter(like for label, _, like in priced_here if label.section.startswith("layer "))
    layer_of: dict[object, str] = {}  # what instructions do -> the first layer with such
    for label, _, like in priced_here:
        layer_of.setdefault(like, label.section)
    attends = next((label.section for label, _, _ in priced_here if label.op == "attend"), "")
    first = Counter(like for label, _, like in priced_here if label.section == layer_of[like])
    rows: list[OpRow] = []
    spent_seconds = 0.0
    for (instr, _), rate, (label, cost, like) in zip(priced.instrs, priced.rates, priced_here, strict=True):
        spent = amount(cost, work.of(instr))
        time = seconds(instr, spent, roofs, working_set, rate) if roofs else None
        spent_seconds += time or 0.0
        if label.section == LAST and rows[-1].section == LAST:
            rows[-1] = _joined(rows[-1], spent, time)
        elif label.section == LAST:
            rows.append(
                OpRow(
                    section=LAST,
                    op=LAST,
                    shape="wanted rows",
                    format="",
                    times=1,
                    spent=spent,
                    seconds=time,
                    bound="memory",
                )
            )
        elif label.section == layer_of[like]:
            times = inner[like] // first[like] if label.section.startswith("layer ") else 1
            label = replace(label, section=attends) if instr.op == "attend" else label  # those of all windows together
            bound = _bound(spent, time, roofs, working_set)
            rows.append(OpRow(**vars(label), times=times, spent=spent, seconds=time, bound=bound))
    return Overview(tuple(rows), layers, priced.weight_bytes, total, spent_seconds if roofs else None)


def _joined(row: OpRow, spent: Amount, time: float | None) -> OpRow:
    """A row that stands for one more instruction."""
    total = Amount(*(a + b for a, b in zip(astuple(row.spent), astuple(spent), strict=True)))
    return replace(row, spent=total, seconds=None if time is None else (row.seconds or 0.0) + time)


def _like(instr: Instr) -> tuple[object, ...]:
    """What instructions of different layers share when they do the same."""
    return instr.op, tuple(name.split(".", 2)[2] if name.startswith("layers.") else name for name in instr.weights)


def labels(program: Program) -> tuple[OpLabel, ...]:
    """Return the label of each instruction, in order."""
    types, section, rows = program.types(), "embed", []
    inner = [at for at, i in enumerate(program.body) if any(name.startswith("layers.") for name in i.weights)]
    for at, instr in enumerate(program.body):
        if instr.output.type.leading == "rows":
            section = LAST if inner and at <= inner[-1] else "head"
        elif instr.layer is not None:  # others go with the one before
            section = f"layer {instr.layer}"
        rows.append(OpLabel(section, instr.op, _shape(instr, program, types), _format(instr, program)))
    return tuple(rows)


def _shape(instr: Instr, program: Program, types: dict[str, Type]) -> str:
    if matrix := program.matrix(instr):
        rows, columns = matrix.shape
        return f"{rows} × {columns}" if instr.op == "embed" else f"{columns} → {rows}"
    cache = next((types[name] for name in instr.inputs if types[name].dtype == "cache"), None)
    if cache is not None and "heads" in get(instr.op).attributes:
        window = f", window {window_of(instr):,}" if window_of(instr) else ""
        return f"{instr.attr('heads')}/{cache.trailing[0]} × {cache.trailing[1]}{window}"
    return str(instr.output.type.width) if not instr.output.type.stored else str(types[instr.inputs[1]].width)


def _format(instr: Instr, program: Program) -> str:
    """The formats of what it reads from memory: weights, else the cache, else what it makes."""
    if matrix := program.matrix(instr):
        return "+".join(dict.fromkeys(_format_name(piece.format) for piece in matrix.pieces))
    if "kv_dtype" in get(instr.op).attributes:
        return str(instr.attr("kv_dtype"))
    return instr.output.type.dtype


def _format_name(form: str) -> str:
    """A format's name, with the one it is packed as where that is another."""
    ours = formats.packed(form).name
    return form if ours == form else f"{form} as {ours}"


def _bound(spent: Amount, time: float | None, roofs: Roofs | None, working_set: int) -> str:
    if roofs is None or not time:
        return ""
    reads = (spent.weight_bytes + spent.kv_bytes) / roofs.read_bytes_per_s(working_set)
    return "memory" if reads >= time else "compute"
