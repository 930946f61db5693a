"""How fast a priced Program can be at most: steps of decoding and of prefill, each op at its own roof."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roofline.program.ir import Program
from roofline.program.passes.price import (
    Price,
    RoofRates,
    amount,
    arithmetic,
    mixture,
    price,
    seconds,
    step_work,
)

_SPENT = ("weight_bytes", "kv_bytes", "flops", "link_bytes")  # as Amount and Rate name them


@dataclass(frozen=True)
class Rate:
    """The least time of one step, and what bounds it.

    step: "decode" or "prefill"; sequences: in the step; context: tokens that each has after it; tokens: computed in the
    step; tokens_per_s: of all sequences together; seconds: the sum over the ops of the longer of reads and arithmetic;
    bound: "memory" or "compute", whichever takes longer over all ops; weight_bytes, kv_bytes, flops: what the step
    reads and computes, on one of the devices that share the model; link_bytes: what that device receives from the
    others, which no roof here counts.
    """

    step: str
    sequences: int
    context: int
    tokens: int
    tokens_per_s: float
    seconds: float
    bound: str
    weight_bytes: int
    kv_bytes: int
    flops: int
    link_bytes: int


class Speeds:
    """The rates of one Program at these roofs. Of experts a step reads those that its tokens are routed to, as many as
    there are on average when tokens choose evenly and independently of each other."""

    def __init__(self, program: Program, roofs: RoofRates) -> None:
        self._price: Price = price(program)
        self._roofs = roofs
        self._experts = mixture(program)

    def decode(self, sequences: int, context: int) -> Rate:
        """One step that makes the last token of `context` in each of so many sequences."""
        return self._rate("decode", sequences, 1, context)

    def prefill(self, context: int, sequences: int = 1) -> Rate:
        """One step that computes so many prompts of `context` tokens each."""
        return self._rate("prefill", sequences, context, context)

    def _rate(self, step: str, sequences: int, tokens: int, context: int) -> Rate:
        segments = [(context - tokens, tokens)] * sequences
        work = step_work(sequences * tokens, sequences, segments, self._price.windows, self._experts)
        spent = [amount(cost, work.of(instr)) for instr, cost in self._price.instrs]
        working_set = self._price.weight_bytes + sum(part.kv_bytes for part in spent)
        least = memory = compute = 0.0
        for (instr, _), part in zip(self._price.instrs, spent, strict=True):
            name, divisor = arithmetic(instr)
            least += seconds(instr, part, self._roofs, working_set)
            memory += (part.weight_bytes + part.kv_bytes) / self._roofs.read_bytes_per_s(working_set)
            compute += part.flops * divisor / getattr(self._roofs, name)
        sums = (sum(getattr(part, name) for part in spent) for name in _SPENT)
        bound = "memory" if memory >= compute else "compute"
        count = sequences * tokens
        return Rate(step, sequences, context, count, count / least, least, bound, *sums)


def in_turn(stages: Sequence[Rate]) -> Rate:
    """The rate of a step that goes through stages one after the other: what they read and compute together, bound as
    the longest of them is."""
    longest = max(stages, key=lambda rate: rate.seconds)
    sums = {name: sum(getattr(rate, name) for rate in stages) for name in ("seconds", *_SPENT)}
    return replace(longest, **sums, tokens_per_s=longest.tokens / sums["seconds"])
