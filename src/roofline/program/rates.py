"""How fast a priced Program can be at most: steps of decoding and of prefill, each op at its own roof."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roofline.program.ir import Program
from roofline.program.passes.price import (
    Amount,
    Price,
    RoofRates,
    amount,
    mixture,
    price,
    rate_of,
    seconds,
    step_work,
)

_SPENT = ("weight_bytes", "kv_bytes", "flops", "link_bytes")  # as Amount and StepRate name them


@dataclass(frozen=True)
class StepRate:
    """The least time of one step, and what bounds it.

    step: "decode", "prefill", or "requests" for all steps of some; sequences: in the step; context: tokens that each
    has after it; tokens: computed in the step; tokens_per_s: of all sequences together; seconds: the sum over the ops
    of the longer of reads and arithmetic; bound: "memory" or "compute", whichever takes longer over all ops;
    weight_bytes, kv_bytes, flops: what the step reads and computes, on one of the devices that share the model;
    link_bytes: what that device receives from the others, which no roof here counts.
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


class ProgramSpeeds:
    """The rates of one Program at these roofs. Of experts a step reads those that its tokens are routed to, as many as
    there are on average when tokens choose evenly and independently of each other."""

    def __init__(self, program: Program, roofs: RoofRates) -> None:
        self._price: Price = price(program)
        self._roofs = roofs
        self._experts = mixture(program)

    def decode(self, sequences: int, context: int) -> StepRate:
        """One step that makes the last token of `context` in each of so many sequences."""
        return self._rate("decode", sequences, 1, context)

    def prefill(self, context: int, sequences: int = 1) -> StepRate:
        """One step that computes so many prompts of `context` tokens each."""
        return self._rate("prefill", sequences, context, context)

    def requests(self, sequences: int, prompt: int, answer: int) -> StepRate:
        """So many requests at a time, from their prompts to the ends of their answers; tokens: of the answers.

        It is a limit for any engine: a step for each token of an answer reads the weights once for all sequences, the
        prompts are computed along with other steps, and an op takes as long as all of its reads or all of its
        arithmetic, whichever is longer.
        """
        decode = self._spent(sequences, 1, prompt + answer // 2)
        prefill = self._spent(sequences, prompt, prompt)
        working_set = self._price.weight_bytes + sum(part.kv_bytes for part in decode)
        parts = [
            Amount(
                flops=(answer - 1) * step.flops + whole_prompt.flops,
                weight_bytes=answer * step.weight_bytes,
                kv_bytes=(answer - 1) * step.kv_bytes + whole_prompt.kv_bytes,
                act_bytes=0,
                link_bytes=(answer - 1) * step.link_bytes + whole_prompt.link_bytes,
            )
            for step, whole_prompt in zip(decode, prefill, strict=True)
        ]
        return self._least("requests", parts, working_set, (sequences, prompt + answer, sequences * answer))

    def _spent(self, sequences: int, tokens: int, context: int) -> list[Amount]:
        """What each op takes in a step of so many sequences, each with so many tokens of its context to compute."""
        segments = [(context - tokens, tokens)] * sequences
        work = step_work(sequences * tokens, sequences, segments, self._price.windows, self._experts)
        return [amount(cost, work.of(instr)) for instr, cost in self._price.instrs]

    def _rate(self, step: str, sequences: int, tokens: int, context: int) -> StepRate:
        spent = self._spent(sequences, tokens, context)
        working_set = self._price.weight_bytes + sum(part.kv_bytes for part in spent)
        return self._least(step, spent, working_set, (sequences, context, sequences * tokens))

    def _least(self, step: str, spent: Sequence[Amount], working_set: int, sizes: tuple[int, int, int]) -> StepRate:
        """The least time of what each op takes. sizes: sequences, context and tokens of the rate."""
        least = memory = compute = 0.0
        for (instr, _), rate, part in zip(self._price.instrs, self._price.rates, spent, strict=True):
            name, divisor = rate
            least += seconds(instr, part, self._roofs, working_set, rate)
            memory += (part.weight_bytes + part.kv_bytes) / self._roofs.read_bytes_per_s(working_set)
            compute += part.flops * divisor / rate_of(self._roofs, name)
        sums = {name: sum(getattr(part, name) for part in spent) for name in _SPENT}
        sequences, context, tokens = sizes
        return StepRate(
            step=step,
            sequences=sequences,
            context=context,
            tokens=tokens,
            tokens_per_s=tokens / least,
            seconds=least,
            bound="memory" if memory >= compute else "compute",
            **sums,
        )


def in_turn(stages: Sequence[StepRate]) -> StepRate:
    """The rate of a step that goes through stages one after the other: what they read and compute together, bound as
    the longest of them is."""
    longest = max(stages, key=lambda rate: rate.seconds)
    sums = {name: sum(getattr(rate, name) for rate in stages) for name in ("seconds", *_SPENT)}
    return replace(longest, **sums, tokens_per_s=longest.tokens / sums["seconds"])
