"""A Program as text and back: what goldens hold, what `roofline show --pass` prints, what the digest hashes.

One line a thing. `name: dtype[leading, row...]` is a value; an instruction is
`results = op(inputs; weights; attributes)`, its empty tail left out. A weight's pieces are `tensor[rows] format`, or
`tensor[rows][columns of all] format`.
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import ELEMENT_BYTES, Q_BYTES, STORES, Type
from roofline.program import ir
from roofline.program.ir import WHOLE, ArenaPlace, Instr, KvGroup, Program, Recipe, StateGroup, Value, WeightPiece

# Names of values, weights and file tensors: anything that the separators of this form do not need.
NAME = r"[^\s,;:()\[\]=@]+"


def print_program(program: Program) -> str:
    """The text form. parse_program is its inverse."""
    share = [f"share {_keywords(vars(program.share))}"] if program.share != WHOLE else []
    lines = [f"program {program.name} target={program.target!r}", *share, ""]
    lines += [f"input {_value(value)}" for value in program.inputs]
    lines += [f"output {name}" for name in program.outputs]
    lines += [f"table {name} = {_keywords(vars(table))}" for name, table in program.tables.items()]
    lines += [f"cache {name} = {_cache(group)}" for name, group in program.kv_groups.items()]
    lines += [f"state {name} = {_keywords(vars(group))}" for name, group in program.state_groups.items()]
    lines += ["", *(_weight(name, recipe) for name, recipe in program.weights.items())]
    lines += ["", *(print_instr(instr) for instr in program.body)]
    if program.plan:
        lines += ["", f"arena {program.plan.arena}"]
        lines += [f"place {name} = {p.offset} stride {p.stride}" for name, p in program.plan.places.items()]
    return "\n".join(lines) + "\n"


def program_hash(program: Program) -> str:
    """SHA-256 of the text form, hex."""
    return hashlib.sha256(print_program(program).encode()).hexdigest()


def print_instr(instr: Instr) -> str:
    """One instruction's line."""
    parts = [", ".join(instr.inputs), ", ".join(instr.weights), _keywords(instr.attrs)]
    while parts and not parts[-1]:
        parts.pop()
    return f"{', '.join(_value(v) for v in instr.outputs)} = {instr.op}({'; '.join(parts)})"


def _value(value: Value) -> str:
    leading = (value.type.leading,) if value.type.leading else ()
    return f"{value.name}: {value.type.dtype}[{', '.join(str(n) for n in (*leading, *value.type.trailing))}]"


def _cache(group: KvGroup) -> str:
    return _keywords({name: value for name, value in vars(group).items() if name != "value_dim" or value})


def _weight(name: str, recipe: Recipe) -> str:
    pieces = ", ".join(_piece(piece) for piece in recipe.pieces)
    return f"weight {name}: {recipe.layout}{list(recipe.shape)} = {pieces}"


def _piece(piece: WeightPiece) -> str:
    cut = piece.columns
    columns = f"[{cut.start}:{cut.stop} of {cut.of}]" if cut else ""
    return f"{piece.tensor}[{piece.start}:{piece.stop}]{columns} {piece.format}"


def _keywords(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in mapping.items())


def parse_program(text: str) -> Program:
    """A Program from its text form. Raises ConfigError with the line that cannot be read."""
    parser = _Parser()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                parser.line(line.strip())
            except (ValueError, SyntaxError, TypeError, KeyError) as error:
                raise ConfigError(f"program text, line {number}: {line.strip()!r} cannot be read ({error})") from error
    return parser.program()


class _Parser:
    def __init__(self) -> None:
        self.name = self.target = ""
        self.share = WHOLE
        self.inputs: list[Value] = []
        self.outputs: list[str] = []
        self.tables: dict[str, RopeTable] = {}
        self.groups: dict[str, KvGroup] = {}
        self.state_groups: dict[str, StateGroup] = {}
        self.weights: dict[str, Recipe] = {}
        self.body: list[Instr] = []
        self.arena: Affine | None = None
        self.places: dict[str, ArenaPlace] = {}

    def line(self, line: str) -> None:
        word, _, arguments = line.partition(" ")
        if word == "program":
            self.name, target = _match(rf"({NAME}) target=(.*)", arguments)
            self.target = ast.literal_eval(target)
        elif word == "share":
            self.share = ir.Share(**_parse_keywords(arguments))
        elif word == "input":
            self.inputs += _parse_values(arguments)
        elif word == "output":
            self.outputs.append(arguments)
        elif word == "table":
            name, keywords = arguments.split(" = ", 1)
            self.tables[name] = RopeTable(**_parse_keywords(keywords))
        elif word == "cache":
            name, keywords = arguments.split(" = ", 1)
            self.groups[name] = KvGroup(**_parse_keywords(keywords))
        elif word == "state":
            name, keywords = arguments.split(" = ", 1)
            self.state_groups[name] = StateGroup(**_parse_keywords(keywords))
        elif word == "weight":
            name, recipe = _parse_weight(arguments)
            self.weights[name] = recipe
        elif word == "arena":
            self.arena = Affine.parse(arguments)
        elif word == "place":
            name, offset, stride = _match(rf"({NAME}) = (.*) stride (\d+)", arguments)
            self.places[name] = ArenaPlace(Affine.parse(offset), int(stride))
        else:
            self.body.append(_parse_instr(line))

    def program(self) -> Program:
        plan = ir.ArenaPlan(self.places, self.arena) if self.arena is not None else None
        return Program(
            name=self.name,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            weights=self.weights,
            body=tuple(self.body),
            kv_groups=self.groups,
            state_groups=self.state_groups,
            tables=self.tables,
            target=self.target,
            plan=plan,
            share=self.share,
        )


def _match(pattern: str, text: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text)
    if not match:
        raise ValueError(f"expected {pattern}")
    return match.groups()


def _parse_values(text: str) -> list[Value]:
    values = []
    for name, dtype, shape in re.findall(rf"({NAME}): (\w+)\[([^\]]*)\]", text):
        dims = [d.strip() for d in shape.split(",") if d.strip()]
        if dtype not in (*ELEMENT_BYTES, *Q_BYTES, *STORES):
            raise ValueError(f"{dtype} is no type of values")
        leading = dims.pop(0) if dims and dims[0] in ir.SYMBOLS else None
        values.append(Value(name, Type(dtype, leading, tuple(int(d) for d in dims))))
    if ", ".join(_value(v) for v in values) != text:
        raise ValueError("not a list of values")
    return values


def _parse_weight(text: str) -> tuple[str, Recipe]:
    name, layout, shape, pieces = _match(rf"({NAME}): (\w+)(\[[^\]]*\]) = (.*)", text)
    pieces_read = []
    for piece in pieces.split(", "):
        pattern = rf"({NAME})\[(\d+):(\d+)\](?:\[(\d+):(\d+) of (\d+)\])? (\w+)"
        tensor, start, stop, *edges, kind = _match(pattern, piece)
        columns = ir.Columns(*(int(n) for n in edges)) if edges[0] else None
        pieces_read.append(WeightPiece(tensor, int(start), int(stop), kind, columns))
    return name, Recipe(tuple(ast.literal_eval(shape)), tuple(pieces_read), layout)


def _parse_instr(line: str) -> Instr:
    results, op, arguments = _match(r"(.*?) = (\w+)\((.*)\)", line)
    # Attributes are last and may hold any text, so only the first two separators count.
    parts = [*arguments.split("; ", 2), "", ""][:3] if "; " in arguments else [arguments, "", ""]
    inputs, weights = (tuple(n for n in part.rstrip(";").split(", ") if n) for part in parts[:2])
    return Instr(op, inputs, weights, _parse_keywords(parts[2]), tuple(_parse_values(results)))


def _parse_keywords(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
