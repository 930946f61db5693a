"""shard: one rank's part of a Program whose matrices several ranks share, by the split that the family's spec gives.

Source: Shoeybi et al. 2019 (Megatron-LM). A column split has some of the outputs, a row split some of the inputs, and
its products are summed by all_reduce; of the vocabulary each rank looks up, and makes logits for, its own rows. What is
cut inside a layer is heads and columns of the mlp; between layers every rank has whole rows. Of experts each rank has
some of the columns of every one, so that all ranks have the same work wherever tokens are sent; their products are
summed once a token's experts are combined. Recurrent state is divided with what it is of: the matrices of a delta rule
by value heads, which take their key heads with them, the last columns of a convolution by its channels.

It runs on a Program as traced. Which columns of a value a rank has is found from its readers, last first; then each
instruction is written anew, first to last.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.models.spec import Param
from roofline.ops import formats, registry
from roofline.ops.state import COLUMNS, MATRIX
from roofline.ops.symbol import STORES, Type
from roofline.ops.traits import Trait
from roofline.program.ir import Columns, Instr, Program, Recipe, StateGroup, Value, WeightPiece, kv_group_of
from roofline.program.passes.divide import Heads, Range, divide_columns, divide_heads, divide_rows, divide_value_heads

# Ops that write state: which part of it, and along which axis of that part ranks have shares.
_STATE_PARTS = {"causal_conv": (COLUMNS, 1), "delta_rule": (MATRIX, 0)}
_ALONE = "tensor_parallel=1"
Names = tuple[str, ...]
Cut = tuple[Range, ...]  # the columns of a value that a rank has, in ascending order


def shard(program: Program, params: Iterable[Param], rank: int, ranks: int) -> Program:
    """The Program of one rank.

    A rank's result is whole after each all_reduce and all_gather, so the caches and the columns inside layers are all
    that differs between ranks. The bias of a row split is added by rank 0, to its share of the sum.

    Args:
        program: as traced (and narrowed): not legalised, nothing merged.
        params: the family's spec with one row for each layer.

    Raises:
        CapacityError: more ranks than there are parts of the heads, of a matrix or of the vocabulary.
        UnsupportedError: an op between split matrices that cannot be computed part by part.
    """
    if ranks == 1:
        return program
    return _Writer(_Cuts(program, {param.name: param.split for param in params}, rank, ranks)).program()


class _Cuts:
    """Which columns of each value, and which rows and columns of each weight, the rank has."""

    def __init__(self, program: Program, splits: Mapping[str, str], rank: int, ranks: int) -> None:
        self.source, self.rank, self.ranks = program, rank, ranks
        self._splits, self._types = splits, program.types()
        self.values: dict[str, Cut | None] = {}  # None: all of it
        self.rows: dict[str, Cut] = {}  # of weights split by column or vocabulary
        self.columns: dict[str, Range] = {}  # of weights split by row
        self.vocabularies: dict[str, list[Range]] = {}  # the rows of all ranks
        self._attended = _headed(program, "attend", Trait.BY_COLUMN, Trait.HEAD_PRODUCT)
        self._ruled = _headed(program, "delta_rule", Trait.BY_COLUMN, Trait.BY_HEAD)
        self.heads = self._heads()  # result of an attend -> the rank's heads there
        self.kv_heads = self._kv_heads()  # group of the cache -> the rank's heads of it
        self.value_heads = self._value_heads()
        for instr in reversed(program.body):
            self._demand(instr)

    def split(self, instr: Instr) -> str:
        """How the instruction's matrix is split, as `models.spec` says; "" for a whole one or none."""
        split = self._splits.get(instr.weights[0], "") if instr.has(Trait.SPLITS) else ""
        return "" if split in ("replicate", "shared") else split.removeprefix("served_")

    def _heads(self) -> dict[str, Heads]:
        """The rank's heads in each attention, the same in all that have as many over the same group of the cache."""
        after = [i for i in self.source.body if self.split(i) == "row" and i.inputs[0] in self._attended]
        blocks: dict[str, list[int]] = {}
        for instr in after:
            group = kv_group_of(self._attended[instr.inputs[0]].inputs[1])
            blocks.setdefault(group, []).append(_block(self.source.weights[instr.weights[0]]))
        heads: dict[str, Heads] = {}
        for instr in self.source.body:
            if instr.op == "attend":
                block = math.lcm(*blocks.get(kv_group_of(instr.inputs[1]), ()))
                kv_heads, _ = self._types[instr.inputs[1]].trailing
                dim = self._dim_behind(instr)
                parts = divide_heads(int(instr.attr("heads")), kv_heads, dim, block, self.ranks)
                heads[instr.output.name] = parts[self.rank]
        return heads

    def _kv_heads(self) -> dict[str, Range]:
        """Raises UnsupportedError where attentions over one group of the cache are divided in different ways."""
        divided: dict[str, Range] = {}
        for instr in self.source.body:
            if instr.op == "attend":
                part = self.heads[instr.output.name].kv_heads
                if divided.setdefault(kv_group_of(instr.inputs[1]), part) != part:
                    reason = "layers with different heads over one cache divide it in different ways"
                    raise UnsupportedError(f"a {self.source.name} model under tensor_parallel", reason, [_ALONE])
        return divided

    def _value_heads(self) -> Heads | None:
        """The rank's value heads of the delta rule, with the key heads they read, likewise."""
        rules = [instr for instr in self.source.body if instr.op == "delta_rule"]
        if not rules:
            return None
        names = ("value_heads", "key_heads", "tiled")
        ((heads, key_heads, tiled, width),) = {(*map(i.attr, names), i.output.type.width) for i in rules}
        self._value_dim, block = width // heads, self._block_behind(self._ruled)
        return divide_value_heads(heads, key_heads, self._value_dim, block, self.ranks, tiled)[self.rank]

    def _block_behind(self, headed: Iterable[str]) -> int:
        """Columns that stay together in the matrices split by row that read heads."""
        after = [i for i in self.source.body if self.split(i) == "row" and i.inputs[0] in headed]
        return math.lcm(*(_block(self.source.weights[i.weights[0]]) for i in after))

    def _demand(self, instr: Instr) -> None:
        """Record what the rank's columns of the result need: columns of the operands, rows of the weights."""
        cut, split = self.values.get(instr.output.name), self.split(instr)
        if (split in ("column", "expert_column")) != (cut is not None) and split:
            what = f"{instr.weights[0]}, split by {split},"
            raise UnsupportedError(what, f"its result is {'cut' if cut else 'wanted whole'}", [_ALONE])
        if split == "row":
            self._take(instr.inputs[0], (self._inputs(instr),))
            return
        if split in ("expert_column", "expert_row"):
            self._experts(instr, split, cut)
            return
        if split == "column" and cut is not None:
            self.rows |= dict.fromkeys(instr.weights, cut)
            if instr.has(Trait.HEAD_PRODUCT):
                self._own_heads(instr, cut)
                return
            cut = None  # whole rows go in
        elif split == "vocab":
            self._vocabulary(instr.weights)
        elif instr.op == "kv_write" and self.kv_heads:
            cut = _columns_of_heads(self.kv_heads[kv_group_of(instr.output.name)], instr.output.type.trailing[1])
        elif instr.op == "attend":
            heads = self.heads[instr.output.name].heads
            self.rows |= dict.fromkeys(instr.weights, (heads,))  # a number for each head: its sink
            cut = None if cut is None else _columns_of_heads(heads, self._types[instr.inputs[1]].trailing[1])
        elif cut is not None and instr.has(Trait.HEAD_MOVE):
            self._own_heads(instr, cut)
            return
        elif instr.op == "split" and cut is not None:
            self._join(instr, cut)
            return
        elif instr.op == "delta_rule" and cut is not None:
            self._rule(instr)
            return
        elif instr.op == "causal_conv" and cut is not None:
            self.rows |= dict.fromkeys(instr.weights, cut)  # each channel has its taps, and nothing of others
        elif cut is not None and not _part_by_part(instr, cut):
            reason = "its result is read by a matrix split by row, and depends on columns that other ranks have"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [_ALONE])
        elif cut is not None and instr.has(Trait.GATED) and len(instr.inputs) == 1:
            width = instr.output.type.width  # gate is that wide, and up lies beside it
            cut = (*cut, *((start + width, stop + width) for start, stop in cut))
        for name in instr.inputs:
            self._take(name, None if self._types[name].dtype in ("i32", *STORES) else cut)

    def _dim_behind(self, attend: Instr) -> int:
        """The columns that a head of an attention has where it meets a matrix split by row."""
        result = attend.output.name
        for instr in self.source.body:
            if self.split(instr) == "row" and self._attended.get(instr.inputs[0], instr).output.name == result:
                return self.source.weights[instr.weights[0]].columns // int(attend.attr("heads"))
        return self._types[attend.inputs[1]].trailing[1]

    def _own_heads(self, instr: Instr, cut: Cut) -> None:
        """Record the heads that a move of heads, or a product with the matrix of each, needs of its values. Raises
        UnsupportedError where a head would be cut."""
        heads = int(instr.attr("heads"))
        dim, (first, last) = instr.output.type.width // heads, cut[0] if len(cut) == 1 else (0, 1)
        if len(cut) > 1 or first % dim or last % dim:
            reason = "its result is cut inside a head"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [_ALONE])
        part = first // dim, last // dim
        for number, name in enumerate(instr.inputs):
            is_shared = number == 0 and bool(instr.attrs.get("shared"))  # one head, that stands before all others
            self._take(name, None if is_shared else _columns_of_heads(part, self._types[name].width // heads))

    def _inputs(self, instr: Instr) -> Range:
        """The columns that the rank has of a row split."""
        name = instr.weights[0]
        recipe = self.source.weights[name]
        attend = self._attended.get(instr.inputs[0])
        if attend is not None:
            heads = self.heads[attend.output.name].heads
            (self.columns[name],) = _columns_of_heads(heads, recipe.columns // int(attend.attr("heads")))
        elif instr.inputs[0] in self._ruled and self.value_heads is not None:
            self.columns[name] = _columns(self.value_heads.heads, self._value_dim)
        else:
            self.columns[name] = divide_columns(recipe.columns, _block(recipe), self.ranks, name)[self.rank]
        return self.columns[name]

    def _rule(self, instr: Instr) -> None:
        """Record what a delta rule needs for the rank's value heads: of q and k their key heads, of all else theirs."""
        assert self.value_heads is not None, "there is a rule"
        (qkv, a, b, _), values, keys = instr.inputs, self.value_heads.heads, self.value_heads.kv_heads
        self.rows |= dict.fromkeys(instr.weights, (values,))
        for name in (a, b):
            self._take(name, (values,))
        width = int(instr.attr("key_heads") * instr.attr("key_dim"))
        (first, last), (begin, end) = _columns(keys, instr.attr("key_dim")), _columns(values, self._value_dim)
        self._take(qkv, ((first, last), (width + first, width + last), (2 * width + begin, 2 * width + end)))

    def _experts(self, instr: Instr, split: str, cut: Cut | None) -> None:
        """Record the columns of each expert, which lie side by side in a value for the experts that a token goes to."""
        x, ids = instr.inputs
        top, experts = self._types[ids].width, int(instr.attr("experts"))
        if split == "expert_row":
            first, last = self._inputs(instr)
            each = self.source.weights[instr.weights[0]].columns
            self._take(x, tuple((at * each + first, at * each + last) for at in range(top)))
        else:
            assert cut is not None, "it was compared with the split"
            first, last = cut[0]
            each = instr.output.type.width // top
            rows = tuple((at * each + first, at * each + last) for at in range(experts))
            self.rows |= dict.fromkeys(instr.weights, rows)
            self._take(x, None if instr.has(Trait.EXPERTS) else cut)
        self._take(ids, None)

    def _vocabulary(self, weights: tuple[str, ...]) -> None:
        parts = divide_rows(self.source.weights[weights[0]].shape[0], self.ranks, weights[0])
        self.vocabularies[weights[0]] = parts
        self.rows |= dict.fromkeys(weights, (parts[self.rank],))

    def _take(self, name: str, cut: Cut | None) -> None:
        """Record the columns of a value that a reader needs; all its readers must need the same."""
        if self.values.setdefault(name, cut) != cut:
            reason = "its readers want different columns of it"
            raise UnsupportedError(f"{name} under tensor_parallel", reason, [_ALONE])

    def _join(self, view: Instr, cut: Cut) -> None:
        """Record what a view needs of its value, of which other views need other columns."""
        name, offset = view.inputs[0], int(view.attr("start"))
        before = self.values.get(name, ())
        if before is None:
            self._take(name, cut)
            return
        self.values[name] = tuple(sorted({*before, *((start + offset, stop + offset) for start, stop in cut)}))


class _Writer:
    """The rank's instructions and recipes."""

    def __init__(self, cuts: _Cuts) -> None:
        self.source, self.cuts, self.rank, self.ranks = cuts.source, cuts, cuts.rank, cuts.ranks
        self.weights = {name: self._recipe(name, recipe) for name, recipe in self.source.weights.items()}
        self.states = {name: self._state_group(name, group) for name, group in self.source.state_groups.items()}
        self.inputs = tuple(Value(v.name, self._store(v)) for v in self.source.inputs)
        self.types = {value.name: value.type for value in self.inputs}
        self.body: list[Instr] = []
        self._parts: dict[
            str, str
        ] = {}  # a value that is yet to be summed over the ranks -> what holds this rank's part
        for instr in self.source.body:
            self._write(instr)

    def program(self) -> Program:
        counts = {name: last - first for name, (first, last) in self.cuts.kv_heads.items()}
        groups = self.source.kv_groups.items()
        used = {name for instr in self.body for name in instr.weights}  # rank 0 alone has the biases of row splits
        return replace(
            self.source,
            inputs=self.inputs,
            weights={name: recipe for name, recipe in self.weights.items() if name in used},
            body=tuple(self.body),
            kv_groups={name: replace(group, kv_heads=counts.get(name, group.kv_heads)) for name, group in groups},
            state_groups=self.states,
            share=replace(self.source.share, rank=self.rank, ranks=self.ranks),
        )

    def _write(self, instr: Instr) -> None:
        split, attrs = self.cuts.split(instr), {**instr.attrs, **self._attrs(instr)}
        weights, names = instr.weights, tuple(value.name for value in instr.outputs)
        if split == "expert_row":
            self._parts[names[0]] = names[0]
        if any(name in self._parts for name in instr.inputs):
            self._write_part(instr)
            return
        if split not in ("row", "vocab"):
            self._add(instr.op, instr.inputs, weights, attrs, names)
            return
        if split == "row" and self.rank > 0:
            weights = weights[:1]
        together = "all_reduce"
        attrs_together: dict[str, object] = {"ranks": self.ranks}
        if split == "vocab" and instr.op == "embed":
            attrs["first"] = self.cuts.vocabularies[weights[0]][self.rank][0]
        elif split == "vocab":
            widths = tuple(stop - start for start, stop in self.cuts.vocabularies[weights[0]])
            together, attrs_together = "all_gather", {"widths": widths}
        part = (f"{names[0]}.part",)
        self._add(instr.op, instr.inputs, weights, attrs, part)
        self._add(together, part, (), attrs_together, names)

    def _write_part(self, instr: Instr) -> None:
        """Write an instruction on this rank's part of what experts give. They are summed when a token's are combined:
        as many times fewer numbers travel as a token has experts."""
        name = instr.output.name
        inputs = tuple(self._parts.get(value, value) for value in instr.inputs)
        if instr.op == "expert_bias":
            self._parts[name] = name if self.rank == 0 else inputs[0]  # rank 0 adds it to its share of the sum
            if self.rank == 0:
                self._add(instr.op, inputs, instr.weights, instr.attrs, (name,))
        elif instr.op == "combine":
            self._add(instr.op, inputs, (), instr.attrs, (f"{name}.part",))
            self._add("all_reduce", (f"{name}.part",), (), {"ranks": self.ranks}, (name,))
        else:
            reason = "it reads what experts give before the ranks have added it up"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [_ALONE])

    def _add(self, op: str, inputs: Names, weights: Names, attrs: Mapping[str, object], names: Names) -> None:
        """Append an instruction, its results of the types that its op infers."""
        weight_types = (self.weights[name].type for name in weights)
        types = registry.get(op).results((self.types[name] for name in inputs), weight_types, attrs)
        outputs = tuple(Value(name, kind) for name, kind in zip(names, types, strict=True))
        self.types |= {value.name: value.type for value in outputs}
        self.body.append(Instr(op, inputs, weights, attrs, outputs))

    def _attrs(self, instr: Instr) -> dict[str, object]:
        """The attributes that count heads or columns, for what the rank has of them."""
        if instr.op == "split":
            cut = self.cuts.values.get(instr.inputs[0])
            if cut is None:
                return {}
            return {name: _before(cut, instr.attr(name)) for name in ("start", "stop")}
        if instr.op == "attend":
            first, last = self.cuts.heads[instr.output.name].heads
            among = {"first_head": first, "all_heads": instr.attr("heads")} if instr.attr("alibi") else {}
            return {"heads": last - first, **among}
        values, cut = self.cuts.value_heads, self.cuts.values.get(instr.output.name)
        if instr.op == "delta_rule" and values is not None and cut is not None:
            (first, last), (first_key, last_key) = values.heads, values.kv_heads
            return {"value_heads": last - first, "key_heads": last_key - first_key}
        if cut is not None and instr.has(Trait.BY_HEAD, Trait.HEAD_MOVE, Trait.HEAD_PRODUCT):
            part = sum(stop - start for start, stop in cut)
            return {"heads": int(instr.attr("heads")) * part // instr.output.type.width}
        return {}

    def _recipe(self, name: str, recipe: Recipe) -> Recipe:
        if name in self.cuts.columns:
            return _columns_of(recipe, *self.cuts.columns[name])
        return _rows_of(recipe, self.cuts.rows[name]) if name in self.cuts.rows else recipe

    def _store(self, value: Value) -> Type:
        """The type of an input: of stores what the rank has of them."""
        kind = value.type
        if kind.dtype == "state":
            return replace(kind, trailing=(self.states[kv_group_of(value.name)].layer_values,))
        part = self.cuts.kv_heads.get(kv_group_of(value.name)) if kind.dtype == "cache" else None
        return kind if part is None else replace(kind, trailing=(part[1] - part[0], *kind.trailing[1:]))

    def _state_group(self, name: str, group: StateGroup) -> StateGroup:
        """The parts of a group for what the rank has of them."""
        writers = [i for i in self.source.body if any(v.type.stored and kv_group_of(v.name) == name for v in i.outputs)]
        return replace(group, parts=tuple((part, self._part(part, shape, writers)) for part, shape in group.parts))

    def _part(self, part: str, shape: tuple[int, ...], writers: list[Instr]) -> tuple[int, ...]:
        """The shape of a part of the state for what the rank has of it, which is the same in all layers."""
        shapes = set()
        for instr in writers:
            name, axis = _STATE_PARTS.get(instr.op, ("", 0))
            cut = self.cuts.values.get(instr.output.name)
            if name == part:
                width = instr.output.type.width if cut is None else sum(stop - start for start, stop in cut)
                size = shape[axis] * width // instr.output.type.width
                shapes.add((*shape[:axis], size, *shape[axis + 1 :]))
        if len(shapes) > 1:
            reason = f"its layers would have different shares of their {part}"
            raise UnsupportedError(f"a {self.source.name} model under tensor_parallel", reason, [_ALONE])
        return shapes.pop() if shapes else shape


def _headed(program: Program, op: str, *traits: Trait) -> dict[str, Instr]:
    """Values whose columns are those of the heads of an op, which ops with one of the traits pass on, with that op."""
    sources: dict[str, Instr] = {}
    for instr in program.body:
        passes = instr.has(*traits, Trait.HEAD_MOVE)
        before = [sources[name] for name in instr.inputs if name in sources] if passes else []
        if instr.op == op or before:
            sources[instr.output.name] = instr if instr.op == op else before[0]
    return sources


def _columns_of_heads(heads: Range, dim: int) -> Cut:
    """The columns of heads of so many each."""
    return ((heads[0] * dim, heads[1] * dim),)


def _columns(heads: Range, dim: int) -> Range:
    """The columns of heads that are `dim` wide."""
    return heads[0] * dim, heads[1] * dim


def _part_by_part(instr: Instr, cut: Cut) -> bool:
    """Whether the columns that a rank has of the result need these of the operands alone."""
    if instr.op == "rms_norm" and instr.attr("heads") == 1:  # over the full row, which every rank may have
        return cut == ((0, instr.output.type.width),)
    return instr.has(Trait.BY_COLUMN, Trait.BY_HEAD)


def _block(recipe: Recipe) -> int:
    """Columns that stay together: a block of each piece's format, and of the one it is packed as."""
    return math.lcm(*(form.block for p in recipe.pieces for form in (formats.get(p.format), formats.packed(p.format))))


def _before(cut: Cut, column: int) -> int:
    """Count how many of the first `column` columns of a value the rank has."""
    return sum(max(0, min(stop, column) - start) for start, stop in cut)


def _columns_of(recipe: Recipe, start: int, stop: int) -> Recipe:
    pieces = []
    for piece in recipe.pieces:
        before, of = (piece.columns.start, piece.columns.of) if piece.columns else (0, recipe.columns)
        pieces.append(replace(piece, columns=Columns(before + start, before + stop, of)))
    return replace(recipe, shape=(recipe.shape[0], stop - start), pieces=tuple(pieces))


def _rows_of(recipe: Recipe, rows: Cut) -> Recipe:
    pieces: list[WeightPiece] = []
    # The first row of each piece within the weight, and the end.
    firsts = list(itertools.accumulate((piece.stop - piece.start for piece in recipe.pieces), initial=0))
    for start, stop in rows:
        for n in range(max(0, bisect_right(firsts, start) - 1), min(len(recipe.pieces), bisect_left(firsts, stop))):
            piece, at = recipe.pieces[n], firsts[n]
            first, last = max(start, at), min(stop, firsts[n + 1])
            if first < last:
                begin, end = piece.start + first - at, piece.start + last - at
                pieces.append(WeightPiece(piece.tensor, begin, end, piece.format, piece.columns))
    return replace(recipe, shape=(sum(b - a for a, b in rows), *recipe.shape[1:]), pieces=tuple(pieces))
