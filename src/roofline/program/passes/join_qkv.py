"""join_qkv: q, k and v that are made apart are put side by side before rope and the write to the cache.

Backends take the three as columns of one value. A linear that makes them all gives that for nothing; where they come
from elsewhere, as from attention over compressed keys and values, or from two linears, of which one makes two of them
and reads values where the other reads integers, they are copied together.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from roofline.ops.symbol import Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.rewrite import makers, readers


def join_qkv(program: Program) -> Program:
    """The Program with two join_heads and three splits before each kv_write whose q, k and v are made apart."""
    maker_of, read = makers(program.body), readers(program, program.body)
    norms = [instr for instr in program.body if instr.op == "rms_norm" and instr.weights]
    widths = {norm.output.name: program.weights[norm.weights[0]].shape[0] for norm in norms}
    queries = _own_queries(program)
    moved: set[str] = set()  # results of what stands at the kv_write now
    before: dict[str, list[Instr]] = {}  # cache that a kv_write makes -> what takes its place, itself at the end
    renamed: dict[str, str] = {}  # q that went straight to attend -> its columns
    for write in program.body:
        if write.op != "kv_write" or write.output.name not in queries:
            continue
        names = (queries[write.output.name], *write.inputs[1:])
        by_head = {name for name, width in widths.items() if width == write.output.type.trailing[1]}
        paths = [_path(name, maker_of, read, by_head) for name in names]
        if paths[0].is_normed != paths[1].is_normed:  # one of them over all heads: neither is part of the write
            paths = [_path(name, maker_of, read, set()) for name in names]
        if any(read[path.source] != 1 for path in paths) or len({_whole(p.source, maker_of) for p in paths}) == 1:
            continue
        kinds = [maker_of[path.source].output.type for path in paths]
        if len({(kind.dtype, kind.leading) for kind in kinds}) > 1:
            continue
        body, columns = _side_by_side([path.source for path in paths], kinds, maker_of)
        body += [step for path, column in zip(paths, columns, strict=True) for step in path.reading(column)]
        ends = [path.end(column) for path, column in zip(paths, columns, strict=True)]
        renamed[names[0]] = ends[0]
        before[write.output.name] = [*body, replace(write, inputs=(write.inputs[0], *ends[1:]))]
        moved |= {step.output.name for path in paths for step in path.steps}
    if not before:
        return program
    result: list[Instr] = []
    for instr in program.body:
        if instr.output.name in moved:
            continue
        if instr.op == "attend":
            instr = replace(instr, inputs=(renamed.get(instr.inputs[0], instr.inputs[0]), *instr.inputs[1:]))
        result += before.get(instr.output.name, [instr])
    return replace(program, body=tuple(result))


def _own_queries(program: Program) -> dict[str, str]:
    """The queries of the layer that made each cache, which are the first to read it: layers that write none follow."""
    queries: dict[str, str] = {}
    for instr in program.body:
        if instr.op == "attend":
            queries.setdefault(instr.inputs[1], instr.inputs[0])
    return queries


@dataclass(frozen=True)
class _Path:
    """The norm, the rope and the scale that a value goes through on its way to attention, first to last."""

    source: str
    steps: tuple[Instr, ...]

    @property
    def is_normed(self) -> bool:
        """Whether a norm is among the steps."""
        return any(step.op == "rms_norm" for step in self.steps)

    def reading(self, name: str) -> list[Instr]:
        """The steps, the first of them reading another value."""
        return [replace(step, inputs=(name, *step.inputs[1:])) for step in self.steps[:1]] + list(self.steps[1:])

    def end(self, name: str) -> str:
        """What comes out of them: `name` itself where there are none."""
        return self.steps[-1].output.name if self.steps else name


def _path(name: str, maker_of: Mapping[str, Instr], read: Mapping[str, int], by_head: Container[str]) -> _Path:
    """The steps before a value; by_head: the results of the norms that are among them."""
    steps: list[Instr] = []
    maker = maker_of[name]
    while read[name] == 1 and (_by_position(maker) or name in by_head):
        steps.insert(0, maker)
        name = maker.inputs[0]
        maker = maker_of[name]
    return _Path(name, tuple(steps))


def _by_position(maker: Instr) -> bool:
    """Whether an instruction turns or scales rows by their positions, which it reads beside them."""
    return maker.has(Trait.READS_WIDE) and len(maker.inputs) > 1


def _whole(name: str, maker_of: Mapping[str, Instr]) -> str:
    """The value of which a value is some columns, itself where it is none."""
    maker = maker_of[name]
    return maker.inputs[0] if maker.op == "split" else name


def _side_by_side(sources: list[str], kinds: list[Type], names: Container[str]) -> tuple[list[Instr], list[str]]:
    """The instructions that put q, k and v side by side, and the names of their columns there. names: of the program's
    values: a linear that makes two of them may be called what both are joined to."""
    dtype, leading = kinds[0].dtype, kinds[0].leading
    body, joined, width, columns = [], sources[0], kinds[0].width, [f"{name}.beside" for name in sources]
    for source, kind in zip(sources[1:], kinds[1:], strict=True):
        width += kind.width
        name = f"{joined}+{source}"
        value = Value(f"{name}.beside" if name in names else name, Type(dtype, leading, (width,)))
        body.append(Instr("join_heads", (joined, source), (), {"heads": 1}, (value,)))
        joined = value.name
    start = 0
    for kind, column in zip(kinds, columns, strict=True):
        edges = {"start": start, "stop": start + kind.width}
        body.append(Instr("split", (joined,), (), edges, (Value(column, kind),)))
        start += kind.width
    return body, columns
