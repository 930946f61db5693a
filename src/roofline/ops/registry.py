"""Declaring an op: one decorator over its torch reference gives callable, trace, type rule and price."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from roofline.common.errors import ConfigError
from roofline.common.names import unknown
from roofline.ops.cost import Affine, Cost
from roofline.ops.symbol import Symbol, Type, WeightType

# A call under inspection: one attribute per parameter of the op. Values are Types, weights WeightTypes (None when an
# optional one is left out), the rest the attributes as passed.
Call = SimpleNamespace


@dataclass(frozen=True)
class Op:
    """One word of the vocabulary.

    values, weights, attributes: parameter names by kind, in the order of the signature.
    infer: Call -> Type or tuple of Types, raising ConfigError when the operands do not fit.
    flops, kv_bytes, weight_bytes, link_bytes: Call -> Affine; weight_bytes None means every weight is read once, whole.
    inplace: the value whose buffer the result may take over. fused: made by passes only.
    """

    name: str
    values: tuple[str, ...]
    weights: tuple[str, ...]
    attributes: Mapping[str, Any]
    reference: Callable[..., Any]
    infer: Callable[[Call], Any]
    flops: Callable[[Call], Affine] | None = None
    kv_bytes: Callable[[Call], Affine] | None = None
    weight_bytes: Callable[[Call], Affine] | None = None
    inplace: str | None = None
    fused: bool = False
    link_bytes: Callable[[Call], Affine] | None = None

    def call(self, values: Iterable[Type], weights: Iterable[WeightType], attributes: Mapping[str, Any]) -> Call:
        """The Call of positional values and weights; left-out trailing ones are None."""
        values, weights = list(values), list(weights)
        if len(values) > len(self.values) or len(weights) > len(self.weights):
            raise ConfigError(f"{self.name} takes values {self.values} and weights {self.weights}")
        unknown = set(attributes) - set(self.attributes)
        if unknown:
            raise ConfigError(f"{self.name} has no attribute {', '.join(sorted(unknown))}")
        named = dict.fromkeys((*self.values, *self.weights))
        named |= dict(zip(self.values, values, strict=False)) | dict(zip(self.weights, weights, strict=False))
        return Call(**named, **{**self.attributes, **attributes})

    def types(self, call: Call) -> tuple[Type, ...]:
        """Types of the results; the attribute `out` is the dtype of the last one that is no cache."""
        result = self.infer(call)
        types = result if isinstance(result, tuple) else (result,)
        if call.out:
            at = max(i for i, kind in enumerate(types) if kind.dtype != "cache")
            types = (*types[:at], replace(types[at], dtype=call.out), *types[at + 1 :])
        return types

    def price(self, call: Call) -> Cost:
        """The cost of one call. Activations: every value read once and written once."""
        moved = [getattr(call, name) for name in self.values] + list(self.types(call))
        act = sum((Affine.per(t.leading, t.row_bytes) for t in moved if t is not None), Affine())
        held = [getattr(call, name) for name in self.weights]
        weight = Affine(const=sum(w.nbytes for w in held if w is not None))
        return Cost(
            flops=self.flops(call) if self.flops else Affine(),
            weight_bytes=self.weight_bytes(call) if self.weight_bytes else weight,
            kv_bytes=self.kv_bytes(call) if self.kv_bytes else Affine(),
            act_bytes=act,
            link_bytes=self.link_bytes(call) if self.link_bytes else Affine(),
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
        raise ConfigError(unknown("op", name, _OPS))
    return _OPS[name]


def names() -> tuple[str, ...]:
    """All registered names, in order of registration."""
    _load()
    return tuple(_OPS)


def _load() -> None:
    """Ours, unless they are there already."""
    from roofline import ops

    ops.load()


def op(
    *,
    values: tuple[str, ...],
    weights: tuple[str, ...] = (),
    infer: Callable[[Call], Any],
    flops: Callable[[Call], Affine] | None = None,
    kv_bytes: Callable[[Call], Affine] | None = None,
    weight_bytes: Callable[[Call], Affine] | None = None,
    inplace: str | None = None,
    fused: bool = False,
    link_bytes: Callable[[Call], Affine] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an op over its reference: a function on torch tensors whose parameters are values, weights, attributes.

    The result computes at once on tensors, and records on Symbols. All ops have two attributes that `legalize` sets:
    `order` names the order of a call's arithmetic, `out` the dtype that its result is rounded to ("": as it infers).
    """

    def declare(reference: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(reference)
        rest = [p for p in signature.parameters.values() if p.name not in (*values, *weights)]
        attributes = {p.name: None if p.default is p.empty else p.default for p in rest} | {"order": "", "out": ""}
        name = reference.__name__
        rules = (infer, flops, kv_bytes, weight_bytes, inplace, fused, link_bytes)
        declared = Op(name, values, weights, attributes, reference, *rules)
        register(declared)

        @functools.wraps(reference)
        def call(first: Any, /, *rest: Any, **named: Any) -> Any:
            if isinstance(first, Symbol):
                bound = signature.bind(first, *rest, **named)
                bound.apply_defaults()
                return first.recorder.record(declared, bound.arguments)
            return reference(first, *rest, **named)

        return call

    return declare
