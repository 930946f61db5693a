"""The rules every Program keeps, checked after each pass: what a pass may not break."""

import itertools
import re

from roofline.common.errors import ConfigError
from roofline.ops import formats, registry
from roofline.ops.symbol import Type
from roofline.program.ir import WHOLE, Columns, Program, Recipe, Share, WeightPiece, kv_group_of
from roofline.program.text import NAME
from roofline.program.trace import Tensors


def verify(program: Program, tensors: Tensors | None = None, before: Program | None = None) -> Program:
    """The Program itself when it is sound, else ConfigError.

    before: the Program that a pass was given, which is sound: where the pass left its weights as they are, their pieces
    are not looked at again.

    Checked: names are assigned once and before use; results have the types their ops infer; each cache value is
    written from at most once and nothing reads it after that; weights and tables exist and are used; pieces of a file
    tensor do not overlap and, when `tensors` is given, lie in their tensor, columns cut between blocks, and cover each
    tensor exactly once unless the Program is a share of a model.
    """
    types = _verify_body(program)
    for name in program.outputs:
        if name not in types:
            raise ConfigError(f"output {name} is never assigned")
    used = {name for instr in program.body for name in instr.weights}
    if unused := sorted(set(program.weights) - used):
        raise ConfigError(f"weights no instruction uses: {', '.join(unused)}")
    if before is None or program.share != before.share or not _same_pieces(program, before):
        _verify_weights(program)
        _verify_pieces(program, tensors)
    for name in (program.name, *types, *program.weights):
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"{name!r} cannot stand in a Program's text")
    return program


def _verify_body(program: Program) -> dict[str, Type]:
    types: dict[str, Type] = {}
    spent: set[str] = set()  # caches that have a successor
    for value in program.inputs:
        _assign(types, value.name, value.type, "input")
    for instr in program.body:
        op = registry.get(instr.op)
        for name in instr.inputs:
            if name not in types:
                raise ConfigError(f"{instr.op} reads {name} before it is assigned")
            if name in spent:
                raise ConfigError(f"{instr.op} reads {name} after it was written to")
        for name in instr.weights:
            if name not in program.weights:
                raise ConfigError(f"{instr.op} uses the unknown weight {name}")
        if "table" in instr.attrs and instr.attrs["table"] not in program.tables:
            raise ConfigError(f"{instr.op} uses the unknown table {instr.attrs['table']}")
        inferred = op.results((types[name] for name in instr.inputs), program.weight_types(instr), instr.attrs)
        if inferred != tuple(value.type for value in instr.outputs):
            raise ConfigError(f"{instr.op}: results {instr.outputs} should be of types {inferred}")
        for value in instr.outputs:
            _assign(types, value.name, value.type, instr.op)
            if value.type.stored:
                if kv_group_of(value.name) not in {**program.kv_groups, **program.state_groups}:
                    raise ConfigError(f"{value.name} belongs to no group")
                spent |= {name for name in instr.inputs if types[name].dtype == value.type.dtype}
    return types


def _assign(types: dict[str, Type], name: str, kind: Type, by: str) -> None:
    if name in types:
        raise ConfigError(f"{name} is assigned twice, the second time by {by}")
    types[name] = kind


def _same_pieces(program: Program, before: Program) -> bool:
    """Whether all weights are made of the very pieces that they were made of; their layouts may be others."""
    if program.weights is before.weights:
        return True
    return program.weights.keys() == before.weights.keys() and all(
        recipe.pieces is before.weights[name].pieces and recipe.shape == before.weights[name].shape
        for name, recipe in program.weights.items()
    )


def _verify_weights(program: Program) -> None:
    for name, recipe in program.weights.items():
        if sum([piece.stop - piece.start for piece in recipe.pieces]) != recipe.shape[0]:
            raise ConfigError(f"the pieces of {name} do not add up to its {recipe.shape[0]} rows")
        for piece in recipe.pieces:
            if piece.columns is not None:
                _verify_columns(name, piece, piece.columns, recipe)


def _verify_columns(name: str, piece: WeightPiece, cut: Columns, recipe: Recipe) -> None:
    block, where = formats.get(piece.format).block, f"{name}: columns {cut.start}:{cut.stop} of {cut.of}"
    if len(recipe.shape) != 2 or cut.stop - cut.start != recipe.columns or not 0 <= cut.start < cut.stop <= cut.of:
        raise ConfigError(f"{where} cannot be columns of a weight of shape {list(recipe.shape)}")
    if cut.start % block or cut.stop % block:
        raise ConfigError(f"{where} are cut inside a block of {piece.format}, which is {block}")


def _verify_pieces(program: Program, tensors: Tensors | None) -> None:
    used: dict[str, list[_Box]] = {}
    for recipe in program.weights.values():
        width = Columns(0, recipe.columns, recipe.columns)
        for piece in recipe.pieces:
            used.setdefault(piece.tensor, []).append((piece, piece.columns or width))
    for name, boxes in used.items():
        if _any_overlap(boxes):
            raise ConfigError(f"rows of the file tensor {name} are used twice: {_places(boxes)}")
        if tensors is not None:
            _verify_places(name, boxes, tensors, program.share)
    complete = tensors is not None and program.share == WHOLE
    if tensors is not None and complete and (spare := sorted(set(tensors) - set(used))):
        raise ConfigError(f"file tensors no weight is made of: {', '.join(spare)}")


_Box = tuple[WeightPiece, Columns]  # rows of a file tensor, and the columns of them


def _any_overlap(boxes: list[_Box]) -> bool:
    """Whether two of them share an element. Those of one tensor may be many, as experts' are: each is compared with
    the next ones, as far as its rows reach."""
    boxes = sorted(boxes, key=lambda box: box[0].start)
    if all(one[0].stop <= other[0].start for one, other in itertools.pairwise(boxes)):
        return False  # no two of them have a row in common
    for at, box in enumerate(boxes):
        for other in itertools.takewhile(lambda o, stop=box[0].stop: o[0].start < stop, boxes[at + 1 :]):  # type: ignore[misc]
            if _overlap(box, other):
                return True
    return False


def _overlap(one: _Box, other: _Box) -> bool:
    (rows, columns), (other_rows, other_columns) = one, other
    meets = rows.start < other_rows.stop and other_rows.start < rows.stop
    return meets and columns.start < other_columns.stop and other_columns.start < columns.stop


def _verify_places(name: str, boxes: list[_Box], tensors: Tensors, share: Share) -> None:
    """In their tensor, which a whole Program uses up: boxes without overlap cover what their areas add up to."""
    rows, columns = (*tensors[name].shape, 1)[:2] if name in tensors else (0, 0)
    if any(piece.start < 0 or piece.stop > rows or cut.of != columns for piece, cut in boxes):
        raise ConfigError(f"there is no such part of the file tensor {name} [{rows}, {columns}]: {_places(boxes)}")
    if share == WHOLE and sum((p.stop - p.start) * (cut.stop - cut.start) for p, cut in boxes) != rows * columns:
        raise ConfigError(f"rows of the file tensor {name} are not used exactly once: {_places(boxes)}")


def _places(boxes: list[_Box]) -> str:
    return ", ".join(f"[{piece.start}:{piece.stop}][{cut.start}:{cut.stop}]" for piece, cut in boxes)
