"""The order of the passes: from a family to a Program a backend can run, verified after each step."""

from collections.abc import Iterator, Mapping

from roofline.models.config import ModelConfig
from roofline.models.registry import Family
from roofline.program.ir import Program
from roofline.program.passes.fuse import fuse
from roofline.program.passes.legalize import legalize
from roofline.program.passes.merge import merge
from roofline.program.passes.narrow import narrow
from roofline.program.passes.plan import plan
from roofline.program.target import Target
from roofline.program.trace import TensorInfo, trace
from roofline.program.verify import verify

STAGES = ("trace", "narrow", "legalize", "merge", "fuse", "plan")


def stages(
    family: Family, cfg: ModelConfig, tensors: Mapping[str, TensorInfo], target: Target
) -> Iterator[tuple[str, Program]]:
    """(pass name, the Program after it), in the order of STAGES."""
    program = verify(trace(family, cfg, tensors), tensors)
    yield "trace", program
    program = verify(narrow(program), tensors)
    yield "narrow", program
    program = verify(legalize(program, target), tensors)
    yield "legalize", program
    for name, step in (("merge", merge), ("fuse", fuse), ("plan", plan)):
        program = verify(step(program), tensors)
        yield name, program


def compile_program(family: Family, cfg: ModelConfig, tensors: Mapping[str, TensorInfo], target: Target) -> Program:
    """The planned Program of a model. Raises ConfigError where the tensors do not fit the configuration."""
    *_, (_, program) = stages(family, cfg, tensors, target)
    return program
