"""shard: one rank's part of a Program whose matrices several ranks share, by the split that the family's spec gives.

Source: Shoeybi et al. 2019 (Megatron-LM). A column split has some of the outputs, a row split some of the inputs, and
its products are summed by all_reduce; of the vocabulary each rank looks up, and makes logits for, its own rows. What is
cut inside a layer is heads and columns of the mlp; between layers every rank has whole rows. Of experts each rank has
some of the columns of every one, so that all ranks have the same work wherever tokens are sent; their products are
summed once a token's experts are combined. Recurrent state is divided with what it is of: the matrices of a delta rule
by value heads, which take their key heads with them, that of a scan by its heads (`scan_parts`), the last columns of a
convolution by its channels.

It runs on a Program as traced. Which columns of a value a rank has is found from its readers, last first; then each
instruction is written anew, first to last.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from roofline.common.errors import UnsupportedError
from roofline.models.spec import Param
from roofline.ops import registry
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, Recipe, StateGroup, Value, kv_group_of
from roofline.program.passes.cuts import columns_before, columns_of, rows_of, width_of
from roofline.program.passes.rank_cuts import ALONE, RATES_AXIS, STATE_PARTS, RankCuts, cuts_rows
from roofline.program.passes.scan_parts import has_rates

Names = tuple[str, ...]


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
    return _Writer(RankCuts(program, {param.name: param.split for param in params}, rank, ranks)).program()


class _Writer:
    """The rank's instructions and recipes."""

    def __init__(self, cuts: RankCuts) -> None:
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
        weights, names = instr.weights, tuple(value.name for value in instr.outputs)
        if names[0] in self.cuts.gathered:
            self._write_gathered(instr)
            return
        split, attrs = self.cuts.split(instr), {**instr.attrs, **self._attrs(instr)}
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

    def _write_gathered(self, instr: Instr) -> None:
        """Write a norm over columns that several ranks have: of whole rows, as one process computes it."""
        name, (cut,) = instr.output.name, self.cuts.values[instr.output.name] or ()
        before, whole = f"{name}.gathered", f"{name}.whole"
        self._add("all_gather", instr.inputs, (), {"widths": self.cuts.gathered[name]}, (before,))
        self._add(instr.op, (before,), instr.weights, instr.attrs, (whole,))
        self._add("cut_heads", (whole,), (), {"heads": 1, "start": cut[0], "stop": cut[1]}, (name,))

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
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [ALONE])

    def _add(self, op: str, inputs: Names, weights: Names, attrs: Mapping[str, object], names: Names) -> None:
        """Append an instruction, its results of the types that its op infers."""
        weight_types = (self.weights[name].type for name in weights)
        types = registry.get(op).results((self.types[name] for name in inputs), weight_types, attrs)
        outputs = tuple(Value(name, kind) for name, kind in zip(names, types, strict=True))
        self.types |= {value.name: value.type for value in outputs}
        self.body.append(Instr(op, inputs, weights, attrs, outputs))

    def _attrs(self, instr: Instr) -> dict[str, object]:
        """The attributes that count heads or columns, for what the rank has of them."""
        if instr.op == "split" or cuts_rows(instr, self.cuts.types):
            cut = self.cuts.values.get(instr.inputs[0])
            if cut is None:
                return {}
            return {name: columns_before(cut, instr.attr(name)) for name in ("start", "stop")}
        if instr.op == "attend":
            first, last = self.cuts.heads[instr.output.name].heads
            among = {"first_head": first, "all_heads": instr.attr("heads")} if instr.attr("alibi") else {}
            return {"heads": last - first, **among}
        values, cut = self.cuts.value_heads, self.cuts.values.get(instr.output.name)
        if instr.op == "delta_rule" and values is not None and cut is not None:
            (first, last), (first_key, last_key) = values.heads, values.kv_heads
            return {"value_heads": last - first, "key_heads": last_key - first_key}
        if instr.op == "selective_scan" and self.cuts.scans is not None and cut is not None:
            first, last = self.cuts.scans.by_rank[self.rank].kv_heads
            return {"groups": last - first}
        is_by_head = instr.has(Trait.BY_HEAD, Trait.HEAD_MOVE, Trait.HEAD_PRODUCT)
        if cut is not None and is_by_head and instr.attr("heads") > 1:
            return {"heads": int(instr.attr("heads")) * width_of(cut) // instr.output.type.width}
        return {}

    def _recipe(self, name: str, recipe: Recipe) -> Recipe:
        if name in self.cuts.columns:
            return columns_of(recipe, *self.cuts.columns[name])
        return rows_of(recipe, self.cuts.rows[name]) if name in self.cuts.rows else recipe

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
            name, axis = STATE_PARTS.get(instr.op, ("", 0))
            axis = RATES_AXIS if instr.op == "selective_scan" and has_rates(self.source, instr) else axis
            cut = self.cuts.values.get(instr.output.name)
            if name == part:
                width = instr.output.type.width if cut is None else width_of(cut)
                size = shape[axis] * width // instr.output.type.width
                shapes.add((*shape[:axis], size, *shape[axis + 1 :]))
        if len(shapes) > 1:
            reason = f"its layers would have different shares of their {part}"
            raise UnsupportedError(f"a {self.source.name} model under tensor_parallel", reason, [ALONE])
        return shapes.pop() if shapes else shape
