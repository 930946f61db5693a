"""price: what each instruction computes and moves, as functions of the step, and how long that takes at the roofs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.batch import Batch
from roofline.ops.cost import InstructionCost
from roofline.ops.traits import Trait
from roofline.program.target import CACHE_ORDERS, GPU_ORDERS

if TYPE_CHECKING:
    from roofline.ops.symbol import Type
    from roofline.program.ir import Instr, Program


FLOAT8, FLOAT4 = "E4M3", "MXFP4"  # of ops.formats
INTEGERS = "integers"  # weights that are 8-bit integers times scales, whatever width they have in a file
BF16 = "bf16_flops"
# Arithmetic of a GPU's Program -> the roofs that it may be computed at beside that of bf16, the highest of which
# counts: those of products whose operands hold every code of the weights. What is multiplied with them is rounded so.
ADMITTED = {
    "f16_flops": ("f16_flops",),
    "f8_flops": ("f8_flops",),
    "f4_flops": ("f4_flops", "f8_flops", "int8_ops"),  # twice a code is an integer
    "q8_ops": ("int8_ops",),
}
NAMES = {"f4_flops": "fp4", "f8_flops": "fp8", "f16_flops": "f16", BF16: "bf16", "int8_ops": "int8", "f32_flops": "f32"}


class RoofRates(Protocol):
    """What prices are divided by: measured (`hardware.roofs.Roofs`), or of a data sheet; with the rates that
    `arithmetic` names as attributes beside these (`rate_of`)."""

    @property
    def bf16_flops(self) -> float: ...

    def read_bytes_per_s(self, working_set: float) -> float: ...


@dataclass(frozen=True)
class Work:
    """The size of one step: query tokens, logit rows, keys read (summed over segments), query-key pairs; and of models
    with experts the distinct ones of a layer that tokens, and rows, are expected to be sent to (`with_experts`).

    windowed: window -> (context, pairs) of the layers that have it; 0, full attention, is what context and pairs say.
    """

    tokens: int
    rows: int
    context: int
    pairs: int
    windowed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    experts: float = 0.0
    row_experts: float = 0.0

    def of(self, instr: "Instr") -> "Work":
        """The step as an instruction sees it: with the keys that its window leaves."""
        window = window_of(instr)
        if not window:
            return self
        context, pairs = self.windowed[window]
        return replace(self, context=context, pairs=pairs, windowed={})


@dataclass(frozen=True)
class Mixture:
    """The experts of each layer, and how many of them a row goes to."""

    experts: int
    top: int

    def hit(self, rows: int) -> float:
        """Distinct experts that so many rows are expected to go to, each choosing for itself and none preferred: `top`
        for one row, and never more than there are."""
        if rows == 0:
            return 0.0
        return self.experts - (self.experts - self.top) * (1.0 - self.top / self.experts) ** (rows - 1)


@dataclass(frozen=True)
class Amount:
    """The fields of a Cost at one Work. link_bytes come from other ranks and count against no roof here."""

    flops: int
    weight_bytes: int
    kv_bytes: int
    act_bytes: int
    link_bytes: int


@dataclass(frozen=True)
class Price:
    """The costs of a Program's instructions, in order, the bytes its weights take, and the roof of each instruction's
    arithmetic (`arithmetic`), of a Price of some instructions alone none."""

    instrs: "tuple[tuple[Instr, InstructionCost], ...]"
    weight_bytes: int
    rates: tuple[tuple[str, int], ...]

    def amount(self, work: Work) -> "Amount":
        """What all instructions take in one step."""
        parts = [vars(amount(cost, work.of(instr))) for instr, cost in self.instrs]
        return Amount(**{name: sum(part[name] for part in parts) for name in parts[0]})

    @property
    def total(self) -> InstructionCost:
        """The sum over all instructions, of a Program whose attentions have one window."""
        return sum((cost for _, cost in self.instrs), InstructionCost())

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of its attentions, ascending; 0: full attention."""
        return tuple(sorted({window_of(instr) for instr, _ in self.instrs if instr.op == "attend"}))


def price(program: "Program") -> Price:
    """The price of every instruction. Intermediate values count in act_bytes, which count against no roof: they
    stay in the caches of the chip."""
    types = program.types()
    costs = tuple((instr, program.price(instr, types)) for instr in program.body)
    return Price(costs, sum(recipe.resident_bytes for recipe in program.weights.values()), _rates(program, types))


def _rates(program: "Program", types: "Mapping[str, Type]") -> tuple[tuple[str, int], ...]:
    rates = []
    for instr in program.body:
        matrix = program.matrix(instr)
        codes = "" if matrix is None else _codes(matrix.type.formats)
        rates.append(arithmetic(instr, codes or types[instr.inputs[0]].dtype))
    return tuple(rates)


def _codes(names: "Iterable[str]") -> str:
    """What the weights of a matrix in these formats are multiplied as: FLOAT8, FLOAT4, INTEGERS, "" for wider ones."""
    kinds = {form if form in (FLOAT8, FLOAT4) else INTEGERS if _is_integers(form) else "" for form in names}
    if kinds == {FLOAT4, INTEGERS}:
        return INTEGERS
    return kinds.pop() if len(kinds) == 1 else ""


def _is_integers(name: str) -> bool:
    return formats.packed(name).integers is not None


def arithmetic_roof(program: "Program", roofs: RoofRates) -> tuple[str, float]:
    """The arithmetic that most of what a token takes is computed in (one of NAMES), and its roof in operations a
    second."""
    priced, shares = price(program), Counter[str]()
    for (_, cost), (name, divisor) in zip(priced.instrs, priced.rates, strict=True):
        shares[name] += cost.flops.tokens * divisor
    name, rate = _roof(roofs, shares.most_common(1)[0][0])
    if name == BF16 and getattr(roofs, "without_bf16", False):
        name = "f16_flops"
    return NAMES[name], rate


def in_file(program: "Program") -> "Program":
    """The Program as if kernels read every matrix in its file's own format: what any other program might do."""
    return replace(program, weights={name: replace(one, layout="file") for name, one in program.weights.items()})


def mixture(program: "Program") -> Mixture | None:
    """The experts of a Program's layers, None where it has none. Raises UnsupportedError where layers differ."""
    types = program.types()
    kinds = {
        Mixture(int(instr.attr("experts")), types[instr.inputs[1]].width)
        for instr in program.body
        if instr.has(Trait.EXPERTS)
    }
    if len(kinds) > 1:
        raise UnsupportedError("layers with other numbers of experts", "a step has one price for all of them")
    return next(iter(kinds), None)


def with_experts(work: Work, experts: Mixture | None) -> Work:
    """The size of a step of a model with these experts."""
    if experts is None:
        return work
    return replace(work, experts=experts.hit(work.tokens), row_experts=experts.hit(work.rows))


def amount(cost: InstructionCost, work: Work) -> Amount:
    """A cost for one step."""
    assert not cost.weight_bytes.experts or work.experts or not work.tokens, "a step says which experts it reads"
    sizes = {name: value for name, value in vars(work).items() if name != "windowed"}
    return Amount(*(part.at(**sizes) for part in vars(cost).values()))


def window_of(instr: "Instr") -> int:
    """The window of an attention, 0: none, as of everything else."""
    return int(instr.attr("window")) if instr.op == "attend" else 0


def step_work(
    tokens: int,
    rows: int,
    segments: Sequence[tuple[int, int]],
    windows: Iterable[int],
    experts: Mixture | None = None,
) -> Work:
    """The size of a step. segments: (first position, query tokens) of each; windows: of the Program's attentions;
    experts: of its layers."""

    def keys(window: int) -> tuple[int, int]:
        read, pairs = zip(*(segment_work(first, n, window) for first, n in segments), strict=True)
        return sum(read), sum(pairs)

    work = Work(tokens, rows, *keys(0), {window: keys(window) for window in windows if window})
    return with_experts(work, experts)


def seconds(
    instr: "Instr", spent: Amount, roofs: RoofRates, working_set: int, rate: tuple[str, int] | None = None
) -> float:
    """The least time an instruction can take: its arithmetic at its own roof or its reads, whichever is longer.

    working_set: bytes a step touches in all; weights and KV are read at that size's bandwidth. rate: of its arithmetic
    in its Program (`Price.rates`); None: as the instruction alone says.
    """
    name, divisor = rate or arithmetic(instr)
    compute = spent.flops * divisor / rate_of(roofs, name)
    return max(compute, (spent.weight_bytes + spent.kv_bytes) / roofs.read_bytes_per_s(working_set))


def arithmetic(instr: "Instr", rows: str = "") -> tuple[str, int]:
    """The roof of an instruction's operations, as `rate_of` takes it, and what it is divided by. rows: the dtype of
    what it multiplies on a GPU; FLOAT8, FLOAT4 or INTEGERS where its matrix is in these, whose products chips make of
    two alike."""
    order = instr.attr("order")
    if instr.has(Trait.PRODUCT, Trait.EXPERTS, Trait.HEAD_PRODUCT) and order in ("q8g32", "q15g32"):
        return "int8_ops", 1 if order == "q8g32" else 2  # two products of bytes for one of 15 bits
    if order in GPU_ORDERS:
        narrow = {FLOAT8: "f8_flops", FLOAT4: "f4_flops", INTEGERS: "q8_ops", "f16": "f16_flops"}
        return narrow.get(rows, BF16), 1
    return BF16 if order in CACHE_ORDERS.values() else "f32_flops", 1


def rate_of(roofs: RoofRates, name: str) -> float:
    """Operations a second of an arithmetic by its name: the highest of the roofs that it may be computed at, that of
    bf16 where the chip has none of the others."""
    return _roof(roofs, name)[1]


def _roof(roofs: RoofRates, name: str) -> tuple[str, float]:
    """The roof that `rate_of` takes, and its name."""
    rates = {each: getattr(roofs, each, None) for each in ADMITTED.get(name, (name,))}
    known = {each: float(rate) for each, rate in rates.items() if rate is not None}
    if name in ADMITTED or not known:
        known.setdefault(BF16, float(roofs.bf16_flops))
    return max(known.items(), key=lambda one: one[1])


def work_of(batch: Batch, windows: Iterable[int] = ()) -> Work:
    """The size of the step in a batch buffer; windows: of the Program's attentions."""
    counts = (batch.seg_start[1 : batch.segments + 1] - batch.seg_start[: batch.segments]).tolist()
    segments = [(int(batch.context_len[i]) - n, n) for i, n in enumerate(counts)]
    return step_work(batch.tokens, batch.rows, segments, windows)


def segment_work(first: int, tokens: int, window: int = 0) -> tuple[int, int]:
    """(keys read, query-key pairs) of `tokens` queries at positions first.. of one sequence."""
    end = first + tokens
    if not window or end <= window:
        return end, tokens * first + tokens * (tokens + 1) // 2
    growing = max(0, min(window - first, tokens))  # queries that still see everything before them
    pairs = growing * first + growing * (growing + 1) // 2 + (tokens - growing) * window
    return end - max(0, first - window + 1), pairs
