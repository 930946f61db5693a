"""Profiles with made-up times, for the tests of figures and of the picture."""

import program_builders as builders

from roofline.bench.profile.profile import Profile, ProfiledStep, Timing, summarise
from roofline.hardware.roofs import Roofs
from roofline.program.compile import compile_program
from roofline.program.passes.price import price
from roofline.program.target import CPU

MIB = 1 << 20
ROOFS = Roofs(2e12, 9e11, 5e11, ((MIB, 4e11), (100 * MIB, 1e11)), 2, "avx512", "a chip", "today")
MODEL = builders.build(builders.BASE, embed="Q8_0")
PROGRAM = compile_program(MODEL.family, MODEL.cfg, MODEL.tensors, CPU)
COUNT = len(price(PROGRAM).instrs)


def made(
    step: ProfiledStep, each: list[float], sample: float = 2e-6, around: float = 1e-6, plain: float | None = None,
    roofs: Roofs | None = None,
) -> Profile:  # fmt: skip
    """The profile of a step whose ops take `each` seconds; around: what no op explains; plain: without clocks."""
    timing = Timing(each, sample, sum(each) + sample + around)
    return summarise(PROGRAM, step, [timing], [timing.total if plain is None else plain], roofs or ROOFS)
