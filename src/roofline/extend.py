"""What extensions import: the six registries, and what their entries are made of (docs/how-to/extending.md).

A registration holds for the process it is made in. An installed package is found by every `roofline` command when it
names a function in the entry-point group ``roofline.extensions``.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from roofline.backends import table as _backends
from roofline.common import extensions
from roofline.common.extensions import registered
from roofline.models import registry as _families
from roofline.models.config import ModelConfig
from roofline.models.family import Family
from roofline.models.spec import Param
from roofline.ops import formats as _formats
from roofline.ops import registry as _ops
from roofline.ops.cost import Affine
from roofline.ops.formats import Format
from roofline.ops.registry import Call, CostRule, Result, TypeRule
from roofline.ops.symbol import Type, WeightType
from roofline.ops.traits import Trait
from roofline.program import compile as _passes
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.expand import expand
from roofline.program.passes.rewrite import makers, readers, rename, without_dead
from roofline.train.callback import Callback

if TYPE_CHECKING:
    from roofline.backends.backend import Backend
    from roofline.program.compile import Pass

__all__ = [
    "Affine", "Call", "Callback", "Family", "Format", "Instr", "ModelConfig", "Param", "Program", "Trait", "Type",
    "Value", "WeightType", "expand", "makers", "op", "readers", "register_backend", "register_callback",
    "register_family", "register_format", "register_pass", "registered", "rename", "without_dead",
]  # fmt: skip


def op(
    *,
    values: tuple[str, ...],
    infer: TypeRule,
    weights: tuple[str, ...] = (),
    traits: Iterable[Trait] = (),
    flops: CostRule | None = None,
    kv_bytes: CostRule | None = None,
    weight_bytes: CostRule | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register an op by decorating its torch reference; see `roofline.ops.registry.op`.

    It runs on the reference backend at once. On the cpu a pass must rewrite it into ops that have kernels (`expand`).
    traits: what passes may rely on; none are assumed. Raises ConfigError when the name is taken.
    """

    def declare(reference: Callable[..., Result]) -> Callable[..., Result]:
        _ops.names()  # ours first, so that a name of ours is refused here
        costs = {"flops": flops, "kv_bytes": kv_bytes, "weight_bytes": weight_bytes}
        call = _ops.op(values=values, weights=weights, infer=infer, traits=traits, **costs)(reference)
        extensions.note("op", reference.__name__, reference.__module__)
        return call

    return declare


def register_pass(name: str, run: "Pass", *, after: str = "trace") -> None:
    """Add a pass, Program -> Program, that runs for every model; see `roofline.program.compile.register_pass`."""
    _passes.register_pass(name, run, after=after)
    extensions.note("pass", name, run.__module__)


def register_family(name: str, family: "str | Family", *, gguf: str = "", hf: str = "", like: str = "llama") -> None:
    """Add a model family: an object with check, spec, embed, block and head, or the dotted name of such a module; see
    `roofline.models.registry.register`."""
    _families.register(name, family, gguf=gguf, hf=hf, like=like)
    module = getattr(family, "__module__", None) or getattr(family, "__name__", "")
    extensions.note("model family", name, family if isinstance(family, str) else str(module))


def register_format(form: Format) -> None:
    """Add a weight format; `packed_as` names the format of ours whose tiles and arithmetic stand in for it on the cpu.

    Raises ConfigError when its name or number is taken, or `packed_as` needs a `convert` that is not there.
    """
    _formats.register(form)
    extensions.note("weight format", form.name, form.unpack.__module__)


def register_backend(name: str, backend: "str | Backend") -> None:
    """Add a backend: an object as `roofline.backends.backend.Backend` says, or "module:object", which is imported when
    a model is first loaded on it. Raises ConfigError when the name is taken."""
    _backends.register(name, backend)
    module = backend.partition(":")[0] if isinstance(backend, str) else type(backend).__module__
    extensions.note("backend", name, module)


def register_callback(name: str, make: Callable[..., Callback]) -> None:
    """Add a callback of training runs: `make`, a class or a function, is called with the keys of `callbacks.NAME`.

    Raises ConfigError when the name is taken.
    """
    from roofline.train.config import observers  # pydantic takes 100 ms, and few extensions train

    observers.register(name, make)
    extensions.note("callback", name, make.__module__)
