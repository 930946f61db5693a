"""Declaring an op: one decorator over its torch reference gives the callable, the trace, the type rule, the price and
the traits that passes and backends ask for."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.ops.cost import Affine, InstructionCost
from roofline.ops.symbol import Symbol, Type, WeightType
from roofline.ops.traits import Trait

# A call under inspection: one attribute per parameter of the op. Values are Types, weights WeightTypes (None when an
# optional one is left out), the rest the attributes as passed.
Call = SimpleNamespace
TypeRule = Callable[[Call], "Type | tuple[Type, ...]"]
CostRule = Callable[[Call], Affine]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Op:
    """One word of the vocabulary.

    values, weights, attributes: parameter names by kind, in the order of the signature.
    infer: Call -> Type or tuple of Types, raising ConfigError when the operands do not fit.
    flops, kv_bytes, weight_bytes, link_bytes: Call -> Affine; weight_bytes None means every weight is read once.
    inplace: the value whose buffer the result may take over. traits: what is true of it.
    fuses: the ops that this one stands for, where it is made by passes only.
    """

    name: str
    values: tuple[str, ...]
    reference: Callable[..., Any]
    infer: TypeRule
    weights: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    flops: CostRule | None = None
    kv_bytes: CostRule | None = None
    weight_bytes: CostRule | None = None
    link_bytes: CostRule | None = None
    inplace: str | None = None
    fuses: tuple[str, ...] = ()

    def call(self, values: Iterable[Type], weights: Iterable[WeightType], attributes: Mapping[str, object]) -> Call:
        """The Call of positional values and weights; left-out trailing ones are None."""
        values, weights = list(values), list(weights)
        if len(values) > len(self.values) or len(weights) > len(self.weights):
            raise ConfigError(f"{self.name} takes values {self.values} and weights {self.weights}")
        unknown = set(attributes) - set(self.attributes)
        if unknown:
            raise ConfigError(f"{self.name} has no attribute {', '.join(sorted(unknown))}")
        operands = dict.fromkeys((*self.values, *self.weights))
        operands |= dict(zip(self.values, values, strict=False)) | dict(zip(self.weights, weights, strict=False))
        return Call(**operands, **{**self.attributes, **attributes})

    def results(
        self, values: Iterable[Type], weights: Iterable[WeightType], attributes: Mapping[str, object]
    ) -> tuple[Type, ...]:
        """Types of the results of a call of these operands."""
        return self.types(self.call(values, weights, attributes))

    def types(self, call: Call) -> tuple[Type, ...]:
        """Types of the results; the attribute `out` is the dtype of the last one that is no cache."""
        result = self.infer(call)
        types = result if isinstance(result, tuple) else (result,)
        if call.out:
            at = max(i for i, kind in enumerate(types) if not kind.stored)
            types = (*types[:at], Type(call.out, types[at].leading, types[at].trailing), *types[at + 1 :])
        return types

    def price(self, call: Call) -> InstructionCost:
        """The cost of one call. Activations: every value read once and written once."""
        moved = [getattr(call, name) for name in self.values] + list(self.types(call))
        weights = [getattr(call, name) for name in self.weights]
        rules = {name: getattr(self, name) for name in ("flops", "weight_bytes", "kv_bytes", "link_bytes")}
        costs = {"weight_bytes": Affine(const=sum(w.nbytes for w in weights if w is not None))}
        costs |= {name: rule(call) for name, rule in rules.items() if rule is not None}
        return InstructionCost(
            act_bytes=sum((Affine.per(t.leading, t.row_bytes) for t in moved if t), Affine()), **costs
        )


_OPS: dict[str, Op] = {}


def register(declared: Op) -> None:
    """Add an op. Raises ConfigError when the name is taken."""
    if declared.name in _OPS:
        raise ConfigError(f"an op named {declared.name!r} is already registered")
    _OPS[declared.name] = declared


def get(name: str) -> Op:
    """The op of that name. Raises ConfigError with the nearest known name."""
    if name not in _OPS:
        _load()
    if name not in _OPS:
        extensions.load()
    if name not in _OPS:
        raise ConfigError(unknown("op", name, _OPS))
    return _OPS[name]


def names() -> tuple[str, ...]:
    """All registered names, in order of registration."""
    _load()
    return tuple(_OPS)


def has(name: str, *traits: Trait) -> bool:
    """Whether the op of that name has one of these traits."""
    return not get(name).traits.isdisjoint(traits)


def fusions(last: str) -> dict[str, str]:
    """For two ops in a row of which the second is `last`: name of the first -> the op that stands for both."""
    _load()
    return {op.fuses[0]: op.name for op in _OPS.values() if len(op.fuses) == 2 and op.fuses[1] == last}


def _load() -> None:
    """Import the ops of this package, which registers them."""
    from roofline import ops

    ops.load()


def op(
    *,
    values: tuple[str, ...],
    infer: TypeRule,
    weights: tuple[str, ...] = (),
    traits: Iterable[Trait] = (),
    **declaration: Any,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Declare an op over its reference: a function on torch tensors whose parameters are values, weights, attributes.

    The result computes at once on tensors, and records on Symbols. All ops have two attributes that `legalize` sets:
    `order` names the order of a call's arithmetic, `out` the dtype that its result is rounded to ("": as it infers).

    declaration: the other fields of `Op`: flops, kv_bytes, weight_bytes, link_bytes, inplace, fuses.
    """

    def declare(reference: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(reference)
        rest = [p for p in signature.parameters.values() if p.name not in (*values, *weights)]
        attributes = {p.name: None if p.default is p.empty else p.default for p in rest} | {"order": "", "out": ""}
        name = reference.__name__
        declared = Op(
            name=name,
            values=values,
            reference=reference,
            infer=infer,
            weights=weights,
            attributes=attributes,
            traits=frozenset(traits),
            **declaration,
        )
        register(declared)

        @functools.wraps(reference)
        def call(first: object, /, *rest: object, **keywords: object) -> Result:
            if isinstance(first, Symbol):
                bound = signature.bind(first, *rest, **keywords)
                bound.apply_defaults()
                recorded: Any = first.recorder.record(declared, bound.arguments)
                return recorded  # type: ignore[no-any-return]  # Symbols, where the caller is being traced
            return reference(first, *rest, **keywords)

        return call

    return declare
