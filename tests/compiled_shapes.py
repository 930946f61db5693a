"""Shapes are compiled once in a module: tests of plans, limits and figures ask of the same few published models what
their Programs take, again and again, and to compile one of 80 layers takes a second.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from roofline.program.ir import Program


@contextmanager
def shapes_compiled_once() -> Iterator[None]:
    """Inside, who compiles a shape for GPUs gets the Program of an equal shape, options, chip and share, where one has
    been compiled. A checkpoint with weights is compiled each time; what is raised is not remembered.
    """
    from roofline.backends.gpu import program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "compile_for_gpu", _remembering(program.compile_for_gpu))
        yield


def _remembering(compile_for_gpu: "Callable[..., Program]") -> "Callable[..., Program]":
    from roofline.bundle.shape import ModelShape

    programs: dict[Hashable, Program] = {}

    def remembered(checkpoint: Any, config: Any, options: Any, chip: Any = None, share: Any = None) -> "Program":
        if not isinstance(checkpoint, ModelShape) or checkpoint.has_weights:
            return compile_for_gpu(checkpoint, config, options, chip, share)
        tensors = tuple((name, info.format, tuple(info.shape)) for name, info in checkpoint.tensors.items())
        key = (tensors, repr((config, options, chip, share)))
        if key not in programs:
            programs[key] = compile_for_gpu(checkpoint, config, options, chip, share)
        return programs[key]

    return remembered
