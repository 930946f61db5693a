"""What a rank has of the values and weights of a Program, as the splits of its matrices ask. `shard` writes it."""

import math
from collections.abc import Iterable, Mapping

from roofline.common.errors import UnsupportedError
from roofline.ops.state import COLUMNS, MATRIX
from roofline.ops.symbol import STORES, Type
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, kv_group_of
from roofline.program.passes.cuts import (
    Cut,
    block_of,
    columns_of_heads,
    ends_inside,
    head_columns,
    width_of,
    within,
)
from roofline.program.passes.divide import Heads, Range, divide_columns, divide_heads, divide_rows, divide_value_heads
from roofline.program.passes.scan_parts import divide_scans, scan_inputs

# Ops that write state: which part of it, and along which axis of that part ranks have shares.
STATE_PARTS = {"causal_conv": (COLUMNS, 1), "delta_rule": (MATRIX, 0), "selective_scan": (MATRIX, 0)}
RATES_AXIS = 1  # likewise of a scan with a rate for each state of each channel
ALONE = "tensor_parallel=1"


class RankCuts:
    """Which columns of each value, and which rows and columns of each weight, the rank has."""

    def __init__(self, program: Program, splits: Mapping[str, str], rank: int, ranks: int) -> None:
        self.source, self.rank, self.ranks = program, rank, ranks
        self._splits, self.types = splits, program.types()
        self.values: dict[str, Cut | None] = {}  # None: all of it
        self.rows: dict[str, Cut] = {}  # of weights split by column or vocabulary
        self.columns: dict[str, Range] = {}  # of weights split by row
        self.vocabularies: dict[str, list[Range]] = {}  # the rows of all ranks
        self._attended = _headed(program, "attend", Trait.BY_COLUMN, Trait.HEAD_PRODUCT)
        self._ruled = _headed(program, "delta_rule", Trait.BY_COLUMN, Trait.BY_HEAD)
        self.heads = self._heads()  # result of an attend -> the rank's heads there
        self.kv_heads = self._kv_heads()  # group of the cache -> the rank's heads of it
        self.value_heads = self._value_heads()
        self._scanned = _headed(program, "selective_scan", Trait.BY_COLUMN, Trait.BY_HEAD)
        self._channels = {*self._scanned, *scan_inputs(program)}  # values whose columns are channels of a scan
        self.scans = divide_scans(program, self.types, self._block_behind(self._channels), ranks)
        self.gathered: dict[str, tuple[int, ...]] = {}  # result of a norm -> the widths of the ranks' parts before it
        for instr in reversed(program.body):
            self._demand(instr)
        for instr in program.body:
            self._settle(instr)

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
            blocks.setdefault(group, []).append(block_of(self.source.weights[instr.weights[0]]))
        heads: dict[str, Heads] = {}
        for instr in self.source.body:
            if instr.op == "attend":
                block = math.lcm(*blocks.get(kv_group_of(instr.inputs[1]), ()))
                kv_heads, _ = self.types[instr.inputs[1]].trailing
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
                    raise UnsupportedError(f"a {self.source.name} model under tensor_parallel", reason, [ALONE])
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
        return math.lcm(*(block_of(self.source.weights[i.weights[0]]) for i in after))

    def _demand(self, instr: Instr) -> None:
        """Record what the rank's columns of the result need: columns of the operands, rows of the weights."""
        cut, split = self.values.get(instr.output.name), self.split(instr)
        # The sum over ranks is whole, also where a reader takes all of its columns one by one.
        is_summed = split == "row" and cut is not None and width_of(cut) == instr.output.type.width
        if (split in ("column", "expert_column")) != (cut is not None) and split and not is_summed:
            what = f"{instr.weights[0]}, split by {split},"
            raise UnsupportedError(what, f"its result is {'cut' if cut else 'wanted whole'}", [ALONE])
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
            cut = columns_of_heads(self.kv_heads[kv_group_of(instr.output.name)], instr.output.type.trailing[1])
        elif instr.op == "attend":
            heads = self.heads[instr.output.name].heads
            self.rows |= dict.fromkeys(instr.weights, (heads,))  # a number for each head: its sink
            cut = None if cut is None else columns_of_heads(heads, self.types[instr.inputs[1]].trailing[1])
        elif cut is not None and instr.has(Trait.HEAD_MOVE):
            self._moved(instr, cut)
            return
        elif instr.op == "split" and cut is not None:
            self._join(instr, cut)
            return
        elif instr.op == "delta_rule" and cut is not None:
            self._rule(instr)
            return
        elif instr.op == "selective_scan" and cut is not None:
            self._scan(instr)
            return
        elif instr.op == "causal_conv" and cut is not None:
            self.rows |= dict.fromkeys(instr.weights, cut)  # each channel has its taps, and nothing of others
        elif cut is not None and instr.op == "rms_norm" and instr.inputs[0] in self._scanned:
            self._norm(instr, cut)
        elif cut is not None and not _part_by_part(instr, cut):
            reason = "its result is read by a matrix split by row, and depends on columns that other ranks have"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [ALONE])
        elif cut is not None and instr.has(Trait.GATED) and len(instr.inputs) == 1:
            width = instr.output.type.width  # gate is that wide, and up lies beside it
            cut = (*cut, *((start + width, stop + width) for start, stop in cut))
        for name in instr.inputs:
            self._take(name, None if self.types[name].dtype in ("i32", *STORES) else cut)

    def _dim_behind(self, attend: Instr) -> int:
        """The columns that a head of an attention has where it meets a matrix split by row."""
        result = attend.output.name
        for instr in self.source.body:
            if self.split(instr) == "row" and self._attended.get(instr.inputs[0], instr).output.name == result:
                return self.source.weights[instr.weights[0]].columns // int(attend.attr("heads"))
        return self.types[attend.inputs[1]].trailing[1]

    def _moved(self, instr: Instr, cut: Cut) -> None:
        """Record what a move of heads needs of its values. With one head rows are cut and joined as a whole."""
        if cuts_rows(instr, self.types):
            self._join(instr, cut)
        elif instr.attr("heads") == 1 and len(instr.inputs) == 2 and not instr.attr("shared"):
            width = self.types[instr.inputs[0]].width
            for name, start in zip(instr.inputs, (0, width), strict=True):
                self._take(name, within(cut, start, start + self.types[name].width))
        else:
            self._own_heads(instr, cut)

    def _own_heads(self, instr: Instr, cut: Cut) -> None:
        """Record the heads that a move of heads, or a product with the matrix of each, needs of its values. Raises
        UnsupportedError where a head would be cut."""
        heads = int(instr.attr("heads"))
        dim, (first, last) = instr.output.type.width // heads, cut[0] if len(cut) == 1 else (0, 1)
        if len(cut) > 1 or first % dim or last % dim:
            reason = "its result is cut inside a head"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [ALONE])
        part = first // dim, last // dim
        for number, name in enumerate(instr.inputs):
            is_shared = number == 0 and bool(instr.attrs.get("shared"))  # one head, that stands before all others
            self._take(name, None if is_shared else columns_of_heads(part, self.types[name].width // heads))

    def _inputs(self, instr: Instr) -> Range:
        """The columns that the rank has of a row split."""
        name = instr.weights[0]
        recipe = self.source.weights[name]
        attend = self._attended.get(instr.inputs[0])
        if attend is not None:
            heads = self.heads[attend.output.name].heads
            (self.columns[name],) = columns_of_heads(heads, recipe.columns // int(attend.attr("heads")))
        elif instr.inputs[0] in self._ruled and self.value_heads is not None:
            self.columns[name] = head_columns(self.value_heads.heads, self._value_dim)
        elif instr.inputs[0] in self._channels and self.scans is not None:
            self.columns[name] = self.scans.channels(self.rank)
        else:
            self.columns[name] = divide_columns(recipe.columns, block_of(recipe), self.ranks, name)[self.rank]
        return self.columns[name]

    def _rule(self, instr: Instr) -> None:
        """Record what a delta rule needs for the rank's value heads: of q and k their key heads, of all else theirs."""
        assert self.value_heads is not None, "there is a rule"
        (qkv, a, b, _), values, keys = instr.inputs, self.value_heads.heads, self.value_heads.kv_heads
        self.rows |= dict.fromkeys(instr.weights, (values,))
        for name in (a, b):
            self._take(name, (values,))
        width = int(instr.attr("key_heads") * instr.attr("key_dim"))
        (first, last), (begin, end) = head_columns(keys, instr.attr("key_dim")), head_columns(values, self._value_dim)
        self._take(qkv, ((first, last), (width + first, width + last), (2 * width + begin, 2 * width + end)))

    def _scan(self, instr: Instr) -> None:
        """Record what a scan needs for the rank's heads: B and C of their groups, of all else what is theirs."""
        assert self.scans is not None, "there is a scan"
        heads = self.scans.by_rank[self.rank].heads
        self.rows |= dict.fromkeys(instr.weights, (heads,))
        self._take(instr.inputs[0], self.scans.joined(self.rank))
        self._take(instr.inputs[1], (heads,))

    def _norm(self, instr: Instr, cut: Cut) -> None:
        """Record what a norm of what scans give needs: groups that the rank has, or all ranks' columns."""
        assert self.scans is not None, "there is a scan"
        width, groups = instr.output.type.width, int(instr.attr("heads"))
        parts = [self.scans.channels(rank) for rank in range(self.ranks)]  # all ranks gather, or none does
        if any(ends_inside((part,), width // groups) for part in parts):
            self.gathered[instr.output.name] = self.scans.widths
        else:
            self.rows |= {name: cut for name in instr.weights if self.source.weights[name].shape == (width,)}

    def _experts(self, instr: Instr, split: str, cut: Cut | None) -> None:
        """Record the columns of each expert, which lie side by side in a value for the experts that a token goes to."""
        x, ids = instr.inputs
        top, experts = self.types[ids].width, int(instr.attr("experts"))
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
            raise UnsupportedError(f"{name} under tensor_parallel", reason, [ALONE])

    def _settle(self, instr: Instr) -> None:
        """Give the result of an op on each column the columns that the rank has of its value, where views of it asked
        for more than views of the result. Raises UnsupportedError where something else reads the result."""
        cut, values = self.values.get(instr.output.name), self._values_of(instr)
        if cut is None or not instr.has(Trait.BY_COLUMN) or (instr.has(Trait.GATED) and len(values) == 1):
            return
        if all(self.values[name] == cut for name in values):
            return
        after = [reader for reader in self.source.body if instr.output.name in reader.inputs]
        if len(values) > 1 or not all(reader.has(Trait.VIEW) or cuts_rows(reader, self.types) for reader in after):
            reason = f"others want more columns of {' or '.join(values)}"
            raise UnsupportedError(f"{instr.op} under tensor_parallel", reason, [ALONE])
        self.values[instr.output.name] = self.values[values[0]]

    def _values_of(self, instr: Instr) -> list[str]:
        """The operands that have columns."""
        return [name for name in instr.inputs if self.types[name].dtype not in ("i32", *STORES)]

    def _join(self, view: Instr, cut: Cut) -> None:
        """Record what a view needs of its value, of which other views need other columns."""
        name, offset = view.inputs[0], int(view.attr("start"))
        before = self.values.get(name, ())
        if before is None:
            self._take(name, cut)
            return
        self.values[name] = tuple(sorted({*before, *((start + offset, stop + offset) for start, stop in cut)}))


def cuts_rows(instr: Instr, types: Mapping[str, Type]) -> bool:
    """Say whether an instruction takes some columns of whole rows, without zeros behind them."""
    is_cut = instr.has(Trait.HEAD_MOVE) and len(instr.inputs) == 1
    return is_cut and instr.attr("heads") == 1 and int(instr.attr("stop")) <= types[instr.inputs[0]].width


def _headed(program: Program, op: str, *traits: Trait) -> dict[str, Instr]:
    """Values whose columns are those of the heads of an op, which ops with one of the traits pass on, with that op."""
    sources: dict[str, Instr] = {}
    for instr in program.body:
        passes = instr.has(*traits, Trait.HEAD_MOVE)
        before = [sources[name] for name in instr.inputs if name in sources] if passes else []
        if instr.op == op or before:
            sources[instr.output.name] = instr if instr.op == op else before[0]
    return sources


def _part_by_part(instr: Instr, cut: Cut) -> bool:
    """Whether the columns that a rank has of the result need these of the operands alone."""
    if instr.op == "rms_norm" and instr.attr("heads") == 1:  # over the full row, which every rank may have
        return cut == ((0, instr.output.type.width),)
    return instr.has(Trait.BY_COLUMN, Trait.BY_HEAD)
