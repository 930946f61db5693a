"""fuse: neighbours become one instruction where the result between them is read by nobody else.

expert_linear_silu_mul (fuse_experts.py), qk_norm, linear_silu_mul, *_quantize, linear_add, rope_kv_write, qkv_write,
rope_latent_write (fuse_latent.py), rope_queries (fuse_queries.py); add_norm, whose sum others may read too; and
cut_heads, which copies columns that no other fusion takes. Each rounds exactly where its parts round. A target says
which of them its backend has.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from roofline.ops.registry import fusions as fusions_into
from roofline.program.ir import Instr, Program
from roofline.program.passes.fuse_experts import fuse_experts
from roofline.program.passes.fuse_latent import fuse_latent
from roofline.program.passes.fuse_norms import fuse_norms
from roofline.program.passes.fuse_queries import fuse_queries
from roofline.program.passes.join_qkv import join_qkv
from roofline.program.passes.rewrite import makers, readers, without_dead
from roofline.program.target import CPU

Makers = Mapping[str, Instr]
Read = Mapping[str, int]
# Op -> what add_norm is told where it stands for that norm.
_ADD_NORM = {"rms_norm": {}, "layer_norm": {"layer": True}}
_SCALED = "scale_by_position"  # of q, behind its rope


def fuse(program: Program, fusions: Collection[str] = CPU.fusions) -> Program:
    """The Program with fused instructions, each where the last of its parts stood. fusions: which may be made."""
    if "expert_linear_silu_mul" in fusions:
        program = fuse_experts(program)
    if "qk_norm" in fusions:
        program = fuse_norms(program)
    if "rope_kv_write" in fusions and "qkv_write" in fusions:
        program = join_qkv(program)
    if "rope_latent_write" in fusions:
        program = fuse_latent(program)
    body = list(program.body)
    patterns: dict[str, Callable[[Instr, Makers, Read], Instr | None]] = {
        "linear_silu_mul": partial(_linear_silu_mul, program),
        "quantize": _quantize,
        "linear_add": _linear_add,
        "rope_kv_write": _rope_kv_write,
        "qkv_write": _qkv_write,
        "add_norm": _add_norm,
        "cut_heads": _cut_heads,
    }
    for name, pattern in patterns.items():
        if name in fusions:
            body = _apply(program, body, pattern)
    program = program if body == list(program.body) else without_dead(program, body)
    return fuse_queries(program) if "rope_queries" in fusions else program


def _apply(program: Program, body: list[Instr], pattern: Callable[[Instr, Makers, Read], Instr | None]) -> list[Instr]:
    maker_of, read = makers(body), readers(program, body)
    fused_at: dict[str, Instr] = {}
    read_before: set[str] = set()
    for instr in body:
        new = pattern(instr, maker_of, read)
        # What others read before is not made as late as here: of several norms of one sum, the first makes it.
        if new is not None and read_before.isdisjoint(value.name for value in new.outputs):
            fused_at[instr.output.name] = new
        read_before.update(instr.inputs)
    # Results that a fused instruction now makes: their old makers go. Parts nobody reads any more go as dead.
    replaced = {value.name for new in fused_at.values() for value in new.outputs}
    fused = []
    for instr in body:
        if instr.output.name in fused_at:
            fused.append(fused_at[instr.output.name])
        elif instr.output.name not in replaced:
            fused.append(instr)
    return list(without_dead(program, fused).body)


def _only(name: str, op: str, maker_of: Makers, read: Read) -> Instr | None:
    """The instruction behind a value, if it is that op and the value has one reader."""
    maker = maker_of.get(name)
    return maker if maker is not None and maker.op == op and read[name] == 1 else None


def _linear_silu_mul(program: Program, instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    """Where gate and up are two pieces of one weight, of one size and one format: a kernel holds a tile of each."""
    if instr.op != "silu_mul" or len(instr.inputs) != 1:
        return None
    part = _only(instr.inputs[0], "linear", maker_of, read)
    if part is None or len(part.weights) != 1:
        return None
    pieces = program.weights[part.weights[0]].pieces
    if len(pieces) != 2 or len({(p.stop - p.start, p.format) for p in pieces}) != 1:
        return None
    gate_order = {"gate_order": instr.attr("order")} if instr.attr("order") else {}
    return Instr("linear_silu_mul", part.inputs, part.weights, {**part.attrs, **gate_order}, instr.outputs)


def _quantize(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    part = maker_of.get(instr.inputs[0]) if instr.op == "quantize_rows" else None
    fused = fusions_into("quantize_rows").get(part.op) if part is not None else None
    if part is None or fused is None or read[instr.inputs[0]] != 1:
        return None
    return Instr(fused, part.inputs, part.weights, {**instr.attrs, **part.attrs}, instr.outputs)


def _linear_add(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    if instr.op != "add":
        return None
    for mine, other in (instr.inputs[::-1], instr.inputs):
        if mine != other and (part := _only(mine, "linear", maker_of, read)):
            return Instr("linear_add", (*part.inputs, other), part.weights, part.attrs, instr.outputs)
    return None


def _add_norm(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    """add, norm of the whole sum -> add_norm, which makes both: the sum keeps its name for those who read it later."""
    total = maker_of.get(instr.inputs[0]) if instr.op in _ADD_NORM else None
    if total is None or total.op != "add" or instr.attrs.get("heads", 1) != 1 or not instr.weights:
        return None
    attrs = {**instr.attrs, **_ADD_NORM[instr.op]}
    return Instr("add_norm", total.inputs, instr.weights, attrs, (*total.outputs, *instr.outputs))


def _cut_heads(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    """Columns that are still to be read by themselves, as a copy, where a backend has no views."""
    if instr.op != "split":
        return None
    return Instr("cut_heads", instr.inputs, (), {"heads": 1, **instr.attrs}, instr.outputs)


def _rope_kv_write(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    """split x 3, [rms_norm x 2,] rope x 2, [scale_by_position,] kv_write -> rope_kv_write, or with the norms behind
    rope; q's result keeps its name.

    Anchored at the kv_write: its k leads to the qkv linear, and from there the rope of q is found.
    """
    if instr.op != "kv_write":
        return None
    _cache, k_name, v_name = instr.inputs
    k, v = _head_part(k_name, maker_of, read), _only(v_name, "split", maker_of, read)
    if k is None or v is None:
        return None
    scaled = {maker.inputs[0] for maker in maker_of.values() if maker.op == _SCALED}
    for q_name, maker in maker_of.items():
        if maker.op not in (k.last.op, _SCALED) or q_name == k_name or q_name in scaled:
            continue
        q = _query_part(maker, partial(_head_part, anywhere=maker.op != _SCALED), maker_of, read)
        if q is None or q.rope is None or k.rope is None or q.rope.inputs[1:] != k.rope.inputs[1:]:
            continue
        if _adjacent(q, k, v, maker_of):
            return _fused_write(instr, q, k, q.rope)
    return None


def _qkv_write(instr: Instr, maker_of: Makers, read: Read) -> Instr | None:
    """split x 3, [rms_norm x 2,] [scale_by_position,] kv_write -> qkv_write, where q goes straight to attend; what
    makes it may stand behind the write."""
    if instr.op != "kv_write":
        return None
    (cache, k_name, v_name), head_dim = instr.inputs, instr.output.type.trailing[1]
    k, v = _straight_part(k_name, maker_of, read, head_dim), _only(v_name, "split", maker_of, read)
    if k is None or v is None:
        return None
    for attend in maker_of.values():
        maker = maker_of.get(attend.inputs[0]) if attend.op == "attend" else None
        if maker is None or read[attend.inputs[0]] != 1:
            continue
        q = _query_part(maker, partial(_straight_part, head_dim=head_dim), maker_of, read)
        if q is not None and _adjacent(q, k, v, maker_of):
            attrs = {"heads": q.last.output.type.width // head_dim, **instr.attrs}
            norm_attrs, weights = _norms(q, k)
            inputs = (*q.split.inputs, cache, *(q.scaled.inputs[1:] if q.scaled else ()))
            return Instr(
                "qkv_write", inputs, weights, attrs | norm_attrs | _factors(q), (q.last.output, *instr.outputs)
            )
    return None


@dataclass(frozen=True)
class _Part:
    """One of q and k on its way from the qkv linear: its split, its norm and its rope if it has them; norm_last: the
    norm stands behind rope; scaled: the factors by position that stand behind all of these."""

    split: Instr
    norm: Instr | None
    rope: Instr | None
    norm_last: bool = False
    scaled: Instr | None = None

    @property
    def last(self) -> Instr:
        """What attention reads of it."""
        first, second = (self.rope, self.norm) if self.norm_last else (self.norm, self.rope)
        return self.scaled or second or first or self.split


def _query_part(
    maker: Instr, part_of: Callable[[str, Makers, Read], _Part | None], maker_of: Makers, read: Read
) -> _Part | None:
    """The part whose last instruction is `maker`, which may multiply by factors of positions what `part_of` finds."""
    if maker.op != _SCALED:
        return part_of(maker.output.name, maker_of, read)
    source = maker.inputs[0]
    part = part_of(source, maker_of, read) if read[source] == 1 else None
    if part is None or (part.rope is not None and part.rope.inputs[1:] != maker.inputs[1:]):
        return None
    return replace(part, scaled=maker)


def _head_part(name: str, maker_of: Makers, read: Read, anywhere: bool = False) -> _Part | None:
    last = maker_of.get(name)
    norm_last = last is not None and last.op == "rms_norm"
    if last is None or not (norm_last or last.op == "rope") or not (anywhere or read[name] == 1):
        return None
    other = _only(last.inputs[0], "rope" if norm_last else "rms_norm", maker_of, read)
    rope, norm = (other, last) if norm_last else (last, other)
    if rope is None or (norm is not None and (not norm.weights or norm.attr("heads") != rope.attr("heads"))):
        return None
    split = _only((other or last).inputs[0], "split", maker_of, read)
    return _Part(split, norm, rope, norm_last) if split is not None else None


def _straight_part(name: str, maker_of: Makers, read: Read, head_dim: int) -> _Part | None:
    """One that nothing turns, and of which each head may be normed."""
    norm = _only(name, "rms_norm", maker_of, read)
    if norm is not None and (not norm.weights or norm.attr("heads") * head_dim != norm.output.type.width):
        return None
    split = _only(norm.inputs[0] if norm is not None else name, "split", maker_of, read)
    return _Part(split, norm, None) if split is not None else None


def _adjacent(q: _Part, k: _Part, v: Instr, maker_of: Makers) -> bool:
    """q, k, v are the three parts of one value, in this order, treated alike."""
    if not q.split.inputs == k.split.inputs == v.inputs or (q.norm is None) != (k.norm is None):
        return False
    if q.norm_last != k.norm_last:
        return False
    if q.rope and k.rope and q.rope.attr("table") != k.rope.attr("table"):
        return False
    if q.norm and k.norm and (q.norm.attr("eps"), q.norm.attr("order")) != (k.norm.attr("eps"), k.norm.attr("order")):
        return False
    return _side_by_side(q.split, k.split, v, maker_of)


def _side_by_side(q: Instr, k: Instr, v: Instr, maker_of: Makers) -> bool:
    """Three splits of one value cut all of it, in this order."""
    starts, stops = ([part.attr(edge) for part in (q, k, v)] for edge in ("start", "stop"))
    return [*starts, maker_of[v.inputs[0]].output.type.width] == [0, *stops]


def _factors(q: _Part) -> dict[str, object]:
    """The factors by position of a part that has some."""
    attrs = q.scaled.attrs if q.scaled else {}
    return {name: attrs[name] for name in ("beta", "context", "offset") if name in attrs}


def _norms(q: _Part, k: _Part) -> tuple[dict[str, object], tuple[str, ...]]:
    """Attributes and weights of what norms both, none where nothing does."""
    if not (q.norm and k.norm):
        return {}, ()
    attrs = {name: q.norm.attrs[name] for name in ("eps", "order") if name in q.norm.attrs}
    return attrs | ({"norm_last": True} if q.norm_last else {}), (*q.norm.weights, *k.norm.weights)


def _fused_write(write: Instr, q: _Part, k: _Part, rope: Instr) -> Instr:
    norm_attrs, weights = _norms(q, k)
    attrs = {"table": rope.attr("table"), "heads": rope.attr("heads"), **write.attrs, **norm_attrs, **_factors(q)}
    inputs = (*q.split.inputs, rope.inputs[1], write.inputs[0])
    return Instr("rope_kv_write", inputs, weights, attrs, (q.last.output, *write.outputs))
