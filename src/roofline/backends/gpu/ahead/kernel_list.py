"""Which kernels there are: every module of kernels/ that says what of it is compiled ahead. A new file is found."""

import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from roofline.backends.gpu.signatures import Compilation
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.hardware.chips.chips import Chip

PACKAGE = "roofline.backends.gpu.kernels"


def modules() -> tuple[str, ...]:
    """Dotted names of all modules in kernels/, helpers without a kernel too; nothing is imported for it."""
    package = import_module(PACKAGE)
    return tuple(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__))


def require_compiler() -> None:
    """Raises UnsupportedError with the command that installs what kernels need, where it is missing."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            reason = f"the package {package} is not installed"
            raise UnsupportedError("compiling GPU kernels", reason, ["pip install 'roofline[gpu]'"])


def compilations(chip: Chip, names: Sequence[str] | None = None) -> Iterator[tuple[str, int, Compilation]]:
    """(module, place in it, compilation) of everything compiled ahead for a chip, of `names` (modules) or all.

    Imports triton: see require_compiler.
    """
    for name in modules() if names is None else names:
        for place, compilation in enumerate(_of_module(name, chip.name)):
            yield name, place, compilation


@cache
def _of_module(name: str, chip: str) -> tuple[Compilation, ...]:
    module = import_module(name)
    return tuple(module.compilations(chips.get(chip))) if hasattr(module, "compilations") else ()


def one(name: str, place: int, chip: Chip) -> Compilation:
    """The compilation at that place of a module."""
    return _of_module(name, chip.name)[place]
