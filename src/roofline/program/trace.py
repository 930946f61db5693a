"""trace: run a family's functions on Symbols and write down what they do."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch
from roofline.models.forward import forward
from roofline.models.spec import Param, check, expand
from roofline.ops.registry import Op
from roofline.ops.rope_tables import RopeTable
from roofline.ops.state import state_values
from roofline.ops.symbol import Symbol, TracedParameter, Type
from roofline.ops.symbol import Value as Operand
from roofline.program.ir import Instr, KvGroup, Program, Recipe, StateGroup, Value, WeightPiece, kv_group_of

CACHE, STATE = "kv", "state0"  # each group of the cache has its number behind the name


class DescribesTensor(Protocol):
    """What a trace needs to know of a tensor in the file."""

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, DescribesTensor]  # of a file, by name


def trace(family: Family, cfg: ModelConfig, tensors: Tensors) -> Program:
    """The Program of a model whose parameters have these formats and shapes.

    Raises ConfigError when a parameter is missing, spare or of another shape than the family's spec says.
    """
    table = expand(family.spec(cfg), cfg.layers)
    check(table, {name: info.shape for name, info in tensors.items()})
    weights = {}
    for param in table:
        if param.tied_to is None:
            weights[param.name] = Recipe(param.shape, _pieces(param, tensors))
    recorder = NamingRecorder()
    fields = {"ids": "tokens", "positions": "tokens", "logit_rows": "rows"}
    inputs = {name: recorder.input(name, Type("i32", leading)) for name, leading in fields.items()}
    groups = _kv_groups(cfg)
    first, *further = [recorder.input(f"{name}.0", Type("cache", None, (g.kv_heads, g.head_dim))) for name, g in groups]
    parts = cfg.state_parts
    state = recorder.input(f"{STATE}.0", Type("state", None, (state_values(parts),))) if parts else None
    batch = ForwardBatch(**inputs, cache=first, state=state, further=list(further))
    parameters = {name: TracedParameter(name, recipe.type) for name, recipe in weights.items()}
    logits = forward(family, cfg, parameters, batch)
    assert isinstance(logits, Symbol)
    stores = [batch.cache, *batch.further, *([] if batch.state is None else [batch.state])]
    return Program(
        name=cfg.family,
        inputs=tuple(recorder.inputs),
        outputs=(logits.name, *(store.name for store in stores if isinstance(store, Symbol))),
        weights=weights,
        body=tuple(recorder.body),
        kv_groups=dict(groups),
        state_groups={STATE: StateGroup(sum(map(cfg.keeps_state, range(cfg.layers))), parts)} if parts else {},
        tables={name: table for table, name in recorder.tables.items()},
    )


def _pieces(param: Param, tensors: Tensors) -> tuple[WeightPiece, ...]:
    """The tensor of a parameter; of experts a piece for each, of one tensor or of their own."""
    if not param.experts:
        return (WeightPiece(param.name, 0, param.shape[0], tensors[param.name].format),)
    rows, numbers = param.shape[0] // param.experts, range(param.experts)
    if param.name in tensors:
        return tuple(WeightPiece(param.name, n * rows, (n + 1) * rows, tensors[param.name].format) for n in numbers)
    return tuple(WeightPiece(param.expert(n), 0, rows, tensors[param.expert(n)].format) for n in numbers)


def _kv_groups(cfg: ModelConfig) -> list[tuple[str, KvGroup]]:
    """The name of each group of the cache, and the layers in it."""
    layers, groups = range(cfg.layers), []
    for number, shape in enumerate(cfg.kv_shapes):
        writers = [layer for layer in layers if cfg.attends(layer) and cfg.kv_shape(layer) == shape]
        window = _window(cfg, [layer for layer in layers if cfg.kv_shape(layer) == shape])
        group = KvGroup(layers=len(writers), window=window, format="f32", **shape._asdict())
        groups.append((f"{CACHE}{number}", group))
    return groups


def _window(cfg: ModelConfig, layers: Sequence[int]) -> int:
    """The window that all layers of a group have, else 0: their keys lie in the same pages, which keep what any of them
    reads."""
    windows = {cfg.window(layer) for layer in layers}
    return windows.pop() if len(windows) == 1 else 0


def trace_shape(family: Family, cfg: ModelConfig, form: str = "BF16") -> Program:
    """The Program of a model that there are no weights of, as if all were in one format."""
    params = (param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None)
    return trace(family, cfg, {param.name: SimpleNamespace(format=form, shape=param.shape) for param in params})


class NamingRecorder:
    """Names values x0, x1, ... and the caches of a group kv0.1, kv0.2, ... as they are made."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.body: list[Instr] = []
        self.tables: dict[RopeTable, str] = {}
        self.count = 0
        self.writes: dict[str, int] = {}

    def input(self, name: str, kind: Type) -> Symbol:
        self.inputs.append(Value(name, kind))
        return Symbol(name, kind, self)

    def add(self, x: Symbol, y: Operand) -> Symbol:
        added: Symbol = ops.add(x, y)  # type: ignore[assignment]  # typed as on tensors
        return added

    def record(self, op: Op, arguments: Mapping[str, object]) -> Symbol | tuple[Symbol, ...]:
        """Append one call of an op."""
        values = _leading(op, op.values, arguments)
        weights = _leading(op, op.weights, arguments)
        attrs = {
            key: self._table(value) if isinstance(value, RopeTable) else value
            for key, value in arguments.items()
            if key in op.attributes and value != op.attributes[key]
        }
        types = op.results((v.type for v in values), (w.type for w in weights), attrs)
        sources = {v.type.dtype: v.name for v in values if v.type.stored}
        results = [Symbol(self.name(kind, sources.get(kind.dtype, "")), kind, self) for kind in types]
        outputs = tuple(Value(r.name, r.type) for r in results)
        self.body.append(Instr(op.name, tuple(v.name for v in values), tuple(w.name for w in weights), attrs, outputs))
        return results[0] if len(results) == 1 else tuple(results)

    def _table(self, table: RopeTable) -> str:
        return self.tables.setdefault(table, f"rope{len(self.tables)}")

    def name(self, kind: Type, source: str) -> str:
        """A new name for a result; source: the store it was written from, if it is one."""
        if kind.stored:
            group = kv_group_of(source)
            self.writes[group] = self.writes.get(group, 0) + 1
            return f"{group}.{self.writes[group]}"
        self.count += 1
        return f"x{self.count - 1}"


def _leading(op: Op, names: tuple[str, ...], arguments: Mapping[str, Any]) -> list[Any]:
    """The operands of a call; one that is left out may only be followed by others left out."""
    operands = [arguments.get(name) for name in names]
    while operands and operands[-1] is None:
        operands.pop()
    if any(operand is None for operand in operands):
        raise ConfigError(f"{op.name}: {names[operands.index(None)]} is missing")
    return operands
