"""What a model is in figures, read from its Program as traced: parameters, bytes, operations, what a token costs."""

from dataclasses import dataclass, replace
from math import prod

from roofline.ops import formats
from roofline.ops.traits import Trait
from roofline.program.ir import KvGroup, Program
from roofline.program.passes.price import mixture, price
from roofline.program.trace import Tensors


@dataclass(frozen=True)
class Stored:
    """The tensors of a file that are in one format. bytes: as the file has them."""

    format: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Of one model. Parameters count tied matrices once.

    active: parameters that one token meets: of the experts, those that it is routed to; embedding: parameters of the
    tables that rows are looked up in, tied: whether the head multiplies with one of them; experts, top: of a layer, and
    how many a token is routed to, 0 without experts.

    stored: by format, the largest first; kv_groups: layers whose caches are alike; state_bytes: of recurrent state of a
    sequence, however long it is; token_flops: operations for one token with one row of logits, without attention;
    pair_flops: for each token it attends to; ops: the vocabulary it is written in, by order of use.
    """

    layers: int
    parameters: int
    active: int
    embedding: int
    tied: bool
    experts: int
    top: int
    stored: tuple[Stored, ...]
    kv_groups: tuple[KvGroup, ...]
    state_bytes: int
    token_flops: int
    pair_flops: int
    ops: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of all tensors, as the file has them."""
        return sum(row.bytes for row in self.stored)

    def kv_bytes(self, form: str) -> int:
        """Bytes of K and V of one token over all layers, in a format of the cache."""
        return sum(replace(group, format=form).token_bytes for group in self.kv_groups)


def summarize(program: Program, tensors: Tensors) -> Summary:
    """The figures of a Program as `program.trace.trace` makes it of these tensors."""
    sizes = {name: prod(recipe.shape) for name, recipe in program.weights.items()}
    total = sum(sizes.values())
    looked_up = {instr.weights[0] for instr in program.body if instr.op == "embed"}
    multiplied = {name for instr in program.body if instr.op != "embed" for name in instr.weights}
    experts = mixture(program)
    routed = {name for instr in program.body if instr.has(Trait.EXPERTS) for name in instr.weights}
    idle = 0 if experts is None else sum(sizes[n] // experts.experts for n in routed) * (experts.experts - experts.top)
    cost = price(program).total.flops
    return Summary(
        layers=program.layers,
        parameters=total,
        active=total - idle,
        embedding=sum(sizes[name] for name in looked_up),
        tied=bool(looked_up & multiplied),
        experts=experts.experts if experts else 0,
        top=experts.top if experts else 0,
        stored=stored_formats(tensors),
        kv_groups=tuple(program.kv_groups.values()),
        state_bytes=sum(group.slot_bytes for group in program.state_groups.values()),
        token_flops=cost.at(tokens=1, rows=1),
        pair_flops=cost.pairs,
        ops=tuple(dict.fromkeys(instr.op for instr in program.body)),
    )


def stored_formats(tensors: Tensors) -> tuple[Stored, ...]:
    """The tensors of a file by format, the one that takes the most bytes first."""
    rows: dict[str, Stored] = {}
    for info in tensors.values():
        size = formats.get(info.format).nbytes(info.shape)
        row = rows.get(info.format, Stored(info.format, 0, 0, 0))
        rows[info.format] = Stored(info.format, row.tensors + 1, row.parameters + prod(info.shape), row.bytes + size)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))
