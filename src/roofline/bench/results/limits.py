"""The limit of a load: the least time that its requests take at the chip's roofs, and what share of it was reached.

For B sequences at a time, prompts of p tokens and answers of n, B requests are done in t(B): n steps that each read the
weights and the sequences' keys and values, and the arithmetic of B prompts along with them (`Speeds.requests` in
`program/rates.py`). Reads and arithmetic of an op may overlap, so that no engine can be faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.bench.results.point import Limit
from roofline.common.errors import RooflineError
from roofline.hardware.roofs import TOLERANCE, Roofs, confirmed

if TYPE_CHECKING:
    from roofline.program.ir import Program
    from roofline.program.rates import Speeds


class ImpossibleResult(RooflineError):
    """A figure above what physics allows: it is refused, with the arithmetic."""


@dataclass(frozen=True)
class Demand:
    """What a load asks for, on average a request: prompt tokens that are computed, tokens of the answer; sequences:
    the most at a time."""

    prompt: float
    answer: float
    sequences: int


@dataclass(frozen=True)
class ModelLimits:
    """What the limits of a model are made of: its Program on this machine's CPU, and the machine's roofs.

    again: roofs that are no lower than some, after another measurement.
    """

    model: str
    program: "Program"
    roofs: Roofs
    again: Callable[[Roofs], Roofs]

    @property
    def weight_bytes(self) -> int:
        from roofline.program.passes.price import price

        return price(self.program).weight_bytes


def limits_here(model: str, kv_cache_dtype: str = "auto") -> ModelLimits:
    """The limits of a model on this machine's CPU, whose roofs are measured where they are not known yet.

    Raises ConfigError and UnsupportedError for a model that cannot be opened.
    """
    from roofline.backends.capacity import host_kv_dtype
    from roofline.backends.cpu.roofs import ensure_roofs
    from roofline.bundle.shape import open_shape
    from roofline.hardware.roofs import highest
    from roofline.models.registry import configure
    from roofline.program.compile import compile_program
    from roofline.program.target import CPU, with_cache

    shape = open_shape(model)
    family, config = configure(shape.config)
    program = compile_program(family, config, shape.tensors, with_cache(CPU, host_kv_dtype(kv_cache_dtype)))
    return ModelLimits(model, program, ensure_roofs(), lambda before: highest(before, ensure_roofs(again=True)))


def limit_of(limits: ModelLimits, demand: Demand, tokens_per_s: float) -> Limit:
    """The limit of a demand, and the share of it that `tokens_per_s`, answer tokens a second, is.

    A share above 100 % has the roofs measured again, since other programs only ever hide what a chip can do. Raises
    ImpossibleResult where it stays above.
    """

    def share(roofs: Roofs) -> float:
        return tokens_per_s / _limit(limits, roofs, demand).tokens_per_s

    roofs, reached = confirmed(limits.roofs, share, limits.again)
    limit = _limit(limits, roofs, demand)
    if reached > TOLERANCE:
        raise ImpossibleResult(
            f"{reached:.0%} of the limit cannot be. {_arithmetic(limits, limit, demand, tokens_per_s)}"
        )
    limit.share_of_measured = reached
    return limit


def _limit(limits: ModelLimits, roofs: Roofs, demand: Demand) -> Limit:
    from roofline.program.rates import Speeds

    speeds = Speeds(limits.program, roofs)
    best = max(
        (_rate_at(speeds, demand, count) for count in _counts(demand.sequences)), key=lambda rate: rate.tokens_per_s
    )
    best.assumptions = [
        f"{limits.model} on {roofs.chip or 'this CPU'}, all cores; roofs measured {roofs.measured}",
        "each op at its own roof; no time between steps; mean lengths",
    ]
    return best


def _counts(most: int) -> list[int]:
    """Numbers of sequences to try: powers of two, and the most."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _rate_at(speeds: "Speeds", demand: Demand, count: int) -> Limit:
    rate = speeds.requests(count, max(1, round(demand.prompt)), max(1, round(demand.answer)))
    return Limit(
        seconds=rate.seconds,
        bound="memory" if rate.bound == "memory" else "compute",
        flops=rate.flops,
        weight_bytes=rate.weight_bytes,
        kv_bytes=rate.kv_bytes,
        tokens_per_s=rate.tokens_per_s,
    )


def _arithmetic(limits: ModelLimits, limit: Limit, demand: Demand, measured: float) -> str:
    return (
        f"{measured:.1f} tokens/s were measured; {limits.model} with {demand.prompt:.0f} prompt and "
        f"{demand.answer:.0f} answer tokens and up to {demand.sequences} sequences at a time must read "
        f"{limit.weight_bytes / 1e9:.2f} GB of weights and {limit.kv_bytes / 1e9:.2f} GB of KV and compute "
        f"{limit.flops / 1e9:.1f} GFLOP, which takes at least {limit.seconds:.3f} s here: at most "
        f"{limit.tokens_per_s:.1f} tokens/s. Name the model that the server runs "
        "(--model-here), and check that prompts are not answered from a cache, and that no tokens are guessed"
    )
