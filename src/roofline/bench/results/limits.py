"""The limit of a load: the least time that its requests take at the chip's roofs, and what share of it was reached.

For B sequences at a time, prompts of p tokens and answers of n, B requests are done in t(B): n steps that each read the
weights and the sequences' keys and values, and the arithmetic of B prompts along with them (`Speeds.requests` in
`program/rates.py`). Reads and arithmetic of an op may overlap, so that no engine can be faster.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roofline.bench.results.point import Device, Limit
from roofline.common.errors import ConfigError
from roofline.hardware.roofs import TOLERANCE, Roofs, confirmed, highest
from roofline.program.passes.price import RoofRates, arithmetic_roof, in_file, price

if TYPE_CHECKING:
    from roofline.bundle.shape import ModelShape
    from roofline.program.ir import Program
    from roofline.program.rates import ProgramSpeeds


@dataclass(frozen=True)
class Demand:
    """What a load asks for, on average a request: prompt tokens that are computed, tokens of the answer; sequences:
    the most at a time; tokens_per_step: of an answer that a step makes, more than 1 only with speculation."""

    prompt: float
    answer: float
    sequences: int
    tokens_per_step: float = 1.0


@dataclass(frozen=True)
class ModelLimits:
    """What the limits of a model are made of: its Program, and the roofs of what runs it.

    origin: whose roofs they are, and where they are from; again: roofs that are no lower than some, after another
    measurement; None where they are of a data sheet. device: as points name it; parameters, formats: of the model;
    below: roofs that the chip did not reach when they were measured again before the run.
    """

    model: str
    program: "Program"
    roofs: RoofRates
    origin: str
    again: Callable[[RoofRates], RoofRates] | None
    device: Device
    parameters: int = 0
    formats: str = ""
    below: tuple[str, ...] = ()

    @property
    def kv_format(self) -> str:
        """Of the key-value cache."""
        return "+".join(dict.fromkeys(group.format for group in self.program.kv_groups.values()))

    @property
    def weight_bytes(self) -> int:
        return price(self.program).weight_bytes


def limits_here(model: str, kv_cache_dtype: str = "auto", dtype: str = "") -> ModelLimits:
    """The limits of a model on this machine's CPU, whose roofs are measured, or measured again shortly. dtype: as of
    `limits_of_product`.

    Raises ConfigError and UnsupportedError for a model that cannot be opened.
    """
    from roofline.backends.capacity import host_kv_dtype
    from roofline.backends.cpu.roofs import ensure_roofs, recheck_roofs
    from roofline.bundle.shape import as_loaded, shape_in
    from roofline.hardware.detect import detect
    from roofline.models.registry import configure
    from roofline.program.compile import compile_program
    from roofline.program.target import CPU, with_cache

    shape = as_loaded(shape_in(model, dtype), "cpu")
    family, config = configure(shape.config)
    program = compile_program(family, config, shape.tensors, with_cache(CPU, host_kv_dtype(kv_cache_dtype)))
    (roofs, checks), machine = recheck_roofs(), detect()
    device = Device(
        name=machine.chip,
        vendor=machine.vendor,
        measured_flops=arithmetic_roof(program, roofs)[1],
        measured_bytes_per_s=roofs.read_bytes_per_s(price(program).weight_bytes),
        measured_at=roofs.measured,
    )

    def again(before: RoofRates) -> RoofRates:
        assert isinstance(before, Roofs), "measured ones"
        return highest(before, ensure_roofs(again=True))

    origin = f"{machine.chip}, {roofs.threads} threads, roofs measured {roofs.measured}"
    below = tuple(check.name for check in checks if check.now < check.kept and not check.agrees)
    parameters, weight_formats = _facts(shape)
    return ModelLimits(
        model=model,
        program=program,
        roofs=roofs,
        origin=origin,
        again=again,
        device=device,
        parameters=parameters,
        formats=weight_formats,
        below=below,
    )


def limits_of_product(model: str, chip: str, count: int = 1, dtype: str = "") -> ModelLimits:
    """The limits of a model on `count` devices of a product by its data sheet, as if they shared all work evenly and
    exchanged nothing.

    dtype: format of the weights, as `roofline plan` has it; "": as the model has them. Raises ConfigError for an
    unknown product or format or for a product without a bandwidth, and as `limits_here`.
    """
    from roofline.backends.gpu.program import compile_for_gpu
    from roofline.backends.options import LoadOptions
    from roofline.bundle.shape import as_loaded, shape_in
    from roofline.hardware.chips.chips import chips
    from roofline.hardware.chips.products import sheet_roofs, titled
    from roofline.models.registry import configure

    product, shape = titled(chip), as_loaded(shape_in(model, dtype), "gpu")
    roofs = sheet_roofs(product)
    if roofs is None:
        raise ConfigError(f"the table of products does not know the bandwidth of {product.name}: leave --chip out")
    _, config = configure(shape.config)
    architecture = chips().get(product.chip)
    program = in_file(compile_for_gpu(shape, config, LoadOptions(backend="gpu"), architecture))
    device = Device(
        name=product.name,
        vendor=architecture.vendor if architecture else "",
        count=count,
        sheet_flops=_finite(arithmetic_roof(program, roofs)[1]),
        sheet_bytes_per_s=roofs.bytes_per_s,
        sheet_source="; ".join(roofs.sources),
        watts=product.watts.value if product.watts else 0.0,
    )
    rates = {name: rate * count for name in _RATES if (rate := getattr(roofs, name)) is not None}
    shared = replace(roofs, **rates)
    origin = f"{count} x {product.name} by its data sheet"
    parameters, weight_formats = _facts(shape)
    return ModelLimits(
        model=model,
        program=program,
        roofs=shared,
        origin=origin,
        again=None,
        device=device,
        parameters=parameters,
        formats=weight_formats,
    )


_RATES = ("bf16_flops", "f16_flops", "f8_flops", "f4_flops", "bytes_per_s", "f32_flops", "int8_ops")


def _finite(rate: float) -> float:
    """The rate, 0 where no table has it."""
    return rate if math.isfinite(rate) else 0.0


def _facts(shape: "ModelShape") -> tuple[int, str]:
    """Parameters of a model, and the formats of its weights, the largest first."""
    from roofline.models.registry import configure
    from roofline.program.summary import summarize
    from roofline.program.trace import trace

    summary = summarize(trace(*configure(shape.config), shape.tensors), shape.tensors)
    return summary.parameters, "+".join(row.format for row in summary.stored)


def limit_of(limits: ModelLimits, demand: Demand, tokens_per_s: float) -> Limit:
    """The limit of a demand, and the share of it that `tokens_per_s`, answer tokens a second, is.

    A share above 100 % has the roofs measured again, since other programs only ever hide what a chip can do. Where it
    stays above, the share says so, `impossible` says why, and whoever measured decides what becomes of it.
    """

    def share(roofs: RoofRates) -> float:
        return tokens_per_s / limit_at(limits, roofs, demand).tokens_per_s

    roofs, reached = limits.roofs, share(limits.roofs)
    if limits.again is not None:
        roofs, reached = confirmed(roofs, share, limits.again)
    limit = limit_at(limits, roofs, demand)
    if limits.again is None:
        limit.share_of_sheet = reached
    else:
        limit.share_of_measured = reached
    return limit


def impossible(limits: ModelLimits, limit: Limit, demand: Demand, tokens_per_s: float) -> str:
    """Why a figure cannot be, with the arithmetic; "" where it can. limit: as `limit_of` gave it for the figure."""
    reached = limit.share_of_sheet if limits.again is None else limit.share_of_measured
    if reached is None or reached <= TOLERANCE:
        return ""
    return f"{reached:.0%} of the limit cannot be. {_arithmetic(limits, limit, demand, tokens_per_s)}"


def limit_at(limits: ModelLimits, roofs: RoofRates, demand: Demand) -> Limit:
    """The limit of a demand at some roofs."""
    from roofline.program.rates import ProgramSpeeds

    speeds = ProgramSpeeds(limits.program, roofs)
    best = max(
        (_rate_at(speeds, demand, count) for count in _counts(demand.sequences)), key=lambda rate: rate.tokens_per_s
    )
    best.assumptions = [
        f"{limits.model} on {limits.origin}",
        "each op at its own roof; no time between steps; mean lengths",
    ]
    if demand.tokens_per_step > 1:
        best.assumptions.append(
            f"speculation makes {demand.tokens_per_step:g} tokens a step; its own reads are not counted"
        )
    return best


def _counts(most: int) -> list[int]:
    """Numbers of sequences to try: powers of two, and the most."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _rate_at(speeds: "ProgramSpeeds", demand: Demand, count: int) -> Limit:
    steps = max(1, round(demand.answer / demand.tokens_per_step))
    rate = speeds.requests(count, max(1, round(demand.prompt)), steps)
    return Limit(
        seconds=rate.seconds,
        bound="memory" if rate.bound == "memory" else "compute",
        flops=rate.flops,
        weight_bytes=rate.weight_bytes,
        kv_bytes=rate.kv_bytes,
        tokens_per_s=rate.tokens_per_s * demand.tokens_per_step,
    )


def _arithmetic(limits: ModelLimits, limit: Limit, demand: Demand, measured: float) -> str:
    return (
        f"{measured:.1f} tokens/s were measured; {limits.model} with {demand.prompt:.0f} prompt and "
        f"{demand.answer:.0f} answer tokens and up to {demand.sequences} sequences at a time must read "
        f"{limit.weight_bytes / 1e9:.2f} GB of weights and {limit.kv_bytes / 1e9:.2f} GB of KV and compute "
        f"{limit.flops / 1e9:.1f} GFLOP, which takes at least {limit.seconds:.3f} s here: at most "
        f"{limit.tokens_per_s:.1f} tokens/s. Name the model that the server runs "
        "(--model-here), and its weights' format (--dtype), check that prompts are not answered from a cache, and say "
        "how many tokens a step makes where it guesses some (--tokens-per-step)"
    )
