"""Runs a Program, legalised or not, one instruction after another, in torch.

An instruction with an `order` of the CPU is computed in exactly that order (orders.py), any other by its op's
reference; 16-bit values are held in float32 and rounded where the Program rounds them. Fused instructions are computed
as the ops they stand for, which is what they promise to equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roofline.backends.reference import experts, orders, state_orders
from roofline.backends.reference.cache import ReferencePages
from roofline.backends.reference.weights import Read, ReferenceWeights
from roofline.common.errors import UnsupportedError
from roofline.ops import adapters, registry
from roofline.ops.activations import halves
from roofline.ops.attention import KvCache, kv_write, log2_slopes, rotate, round_to, split_heads
from roofline.ops.collectives import RankGroup, require_ranks
from roofline.ops.experts import routes_by_logits
from roofline.ops.matmul import Q8Rows, quantize_rows
from roofline.ops.position_factors import PositionFactors
from roofline.ops.rope_tables import cos_sin
from roofline.ops.state import StateStore
from roofline.program.ir import Instr, Program
from roofline.program.target import CACHE_ORDERS, GPU_ORDERS

if TYPE_CHECKING:
    from torch import Tensor

Observer = Callable[[Instr, list[object]], None]


class Interpreter:
    """A Program bound to weights. read: file tensor name -> its bytes, uint8; group: who shares the model, if any."""

    def __init__(self, program: Program, read: Read, group: RankGroup | None = None) -> None:
        require_ranks(program.share.ranks, group)
        self.observer: Observer | None = None  # told of each instruction and its operands
        self.program, self.weights, self.group = program, ReferenceWeights(program, read), group

    def run(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """All values by name. inputs: int64 tensors for the batch fields, a PagedCache for "kv0.0"."""
        import torch

        values = dict(inputs)
        with torch.no_grad():
            for instr in self.program.body:
                operands = [values[name] for name in instr.inputs]
                if self.observer is not None:
                    self.observer(instr, operands)
                results = self.step(instr, operands)
                values |= dict(zip((v.name for v in instr.outputs), results, strict=True))
        return values

    def step(self, instr: Instr, operands: list[object]) -> tuple[object, ...]:
        """The results of one instruction."""
        result = self._compute(instr, operands)
        results = list(result) if isinstance(result, tuple) else [result]
        if out := instr.attr("out"):
            at = max(i for i, value in enumerate(instr.outputs) if not value.type.stored)
            results[at] = round_to(results[at], out)
        return tuple(results)

    def _compute(self, instr: Instr, operands: list[object]) -> Any:
        op = registry.get(instr.op)
        if op.fuses[1:] == ("quantize_rows",):
            attrs = {key: value for key, value in instr.attrs.items() if key in registry.get(op.fuses[0]).attributes}
            rows = self._compute(replace(instr, op=op.fuses[0], attrs=attrs), operands)
            return quantize_rows(rows, instr.attr("group"), instr.attr("bits"))
        method = getattr(self, f"_op_{instr.op}", None)
        return method(instr, *operands) if method else self._by_reference(instr, operands)

    def _by_reference(self, instr: Instr, operands: list[object]) -> Any:
        op = registry.get(instr.op)
        if instr.attr("order") not in ("", *GPU_ORDERS):
            raise UnsupportedError(f"{instr.op} in order {instr.attr('order')!r}", "the reference does not know it")
        attrs = {key: value for key, value in instr.attrs.items() if key not in ("order", "out")}
        if "table" in attrs:
            attrs["table"] = self.program.tables[attrs["table"]]
        parameters = dict(zip(op.values, operands, strict=False))
        parameters |= {key: self.weights.tensor(name) for key, name in zip(op.weights, instr.weights, strict=False)}
        return op.reference(**parameters, **attrs)

    def _op_embed(self, instr: Instr, ids: "Tensor") -> "Tensor":
        import torch

        name, first = instr.weights[0], instr.attr("first")
        if instr.attr("one_row"):
            return self.weights.rows(name, ids.new_zeros(1).numpy()).expand(len(ids), -1)
        if first is None:
            return self.weights.rows(name, ids.numpy())
        inside = (ids >= first) & (ids < first + self.program.weights[name].shape[0])
        rows = self.weights.rows(name, (ids - first).where(inside, 0).numpy())
        return torch.where(inside[:, None], rows, 0.0)

    def _op_linear(self, instr: Instr, x: "Tensor | Q8Rows") -> "Tensor":
        import torch

        order, name = instr.attr("order"), instr.weights[0]
        if order in ("q8g32", "q15g32"):
            assert isinstance(x, Q8Rows), "the order reads integer rows"
            out = torch.cat([orders.linear_integers(x, groups) for groups in self.weights.groups(name)], dim=1)
        elif order == "f32":
            assert not isinstance(x, Q8Rows), "order f32 reads float rows"
            out = orders.linear_f32(x, self.weights.tensor(name))
        else:
            weights = (self.weights.tensor(n) for n in instr.weights)
            return registry.get("linear").reference(x, *weights, x_dtype=instr.attrs.get("x_dtype", "f32"))
        return out + self.weights.tensor(instr.weights[1]) if len(instr.weights) > 1 else out

    def _op_linear_add(self, instr: Instr, x: "Tensor | Q8Rows", residual: "Tensor") -> "Tensor":
        return residual + self._op_linear(instr, x)

    def _op_linear_silu_mul(self, instr: Instr, x: "Tensor | Q8Rows") -> "Tensor":
        gate, up = halves(self._op_linear(instr, x), None)
        if instr.attr("gate_order") == "exp2":
            return orders.silu_exp2(gate) * up
        return registry.get("silu_mul").reference(gate, up)

    def _op_route(self, instr: Instr, x: "Tensor") -> "tuple[Tensor, Tensor]":
        if instr.attr("order") != "exp2":
            weights, ids = self._by_reference(instr, [x])
            return weights, ids
        if routes_by_logits(instr.attr("score"), instr.attr("groups"), instr.attr("scale"), bool(instr.weights)):
            return experts.route_exp2(x, instr.attr("top"), instr.attr("renormalise"))
        bias = self.weights.tensor(instr.weights[0]) if instr.weights else None
        attributes = {name: instr.attr(name) for name in registry.get("route").attributes}
        return experts.route_scores_exp2(x, bias, attributes)

    def _op_expert_linear(self, instr: Instr, x: "Tensor | Q8Rows", ids: "Tensor") -> "Tensor":
        order, name = instr.attr("order"), instr.weights[0]
        if order not in ("q8g32", "q15g32", "f32"):
            result: Tensor = registry.get("expert_linear").reference(
                x, ids, self.weights.tensor(name), instr.attr("experts")
            )
            return result
        return experts.expert_linear(self.weights, name, x, ids, instr.attr("experts"), order)

    def _op_expert_linear_silu_mul(self, instr: Instr, x: "Tensor | Q8Rows", ids: "Tensor") -> "Tensor":
        products = self._op_expert_linear(instr, x, ids).unflatten(1, (ids.shape[1], -1))  # [rows, top, 2 * ffn]
        gate, up = products.chunk(2, dim=2)
        if instr.attr("gate_order") == "exp2":
            return (orders.silu_exp2(gate) * up).flatten(1)
        result: Tensor = registry.get("silu_mul").reference(gate, up).flatten(1)
        return result

    def _op_sigmoid_scale(self, instr: Instr, x: "Tensor", gate: "Tensor") -> "Tensor":
        if instr.attr("order") != "exp2":
            return self._by_reference(instr, [x, gate])
        return experts.sigmoid_scale_exp2(x, gate)

    def _op_rms_norm(self, instr: Instr, x: "Tensor", heads: int | None = None, weight: int = 0) -> "Tensor":
        w = self.weights.tensor(instr.weights[weight]) if instr.weights else None
        eps, heads = instr.attr("eps"), heads or instr.attr("heads")
        if instr.attr("order") == "lanes16":
            return orders.rms_norm_lanes16(x.contiguous(), w, eps, heads)
        return registry.get("rms_norm").reference(x.contiguous(), w, eps, heads)

    def _op_qk_norm(self, instr: Instr, qkv: "Tensor") -> "Tensor":
        import torch

        q, k = (self.weights.tensor(name).shape[0] for name in instr.weights)
        first, second, values = qkv.split([q, k, k], dim=1)
        parts = self._op_rms_norm(instr, first, 1, 0), self._op_rms_norm(instr, second, 1, 1)
        return torch.cat([*parts, values], dim=1)

    def _op_layer_norm(self, instr: Instr, x: "Tensor") -> "Tensor":
        if instr.attr("order") != "lanes16":
            return self._by_reference(instr, [x])
        w, *bias = (self.weights.tensor(name) for name in instr.weights)
        return orders.layer_norm_lanes16(x.contiguous(), w, bias[0] if bias else None, instr.attr("eps"))

    def _op_like_norm(self, instr: Instr, x: "Tensor", y: "Tensor") -> "Tensor":
        return orders.like_norm_lanes16(x, y) if instr.attr("order") == "lanes16" else self._by_reference(instr, [x, y])

    def _op_above_spread(self, instr: Instr, x: "Tensor") -> "Tensor":
        exact = instr.attr("order") == "lanes16"
        return orders.above_spread_lanes16(x, instr.attr("z")) if exact else self._by_reference(instr, [x])

    def _op_cast(self, instr: Instr, x: "Tensor") -> "Tensor":
        return round_to(x, instr.attr("dtype"))

    def _op_gelu(self, instr: Instr, x: "Tensor") -> "Tensor":
        exact = instr.attr("order") == "exp2"
        return orders.gelu_exp2(x, instr.attr("tanh")) if exact else self._by_reference(instr, [x])

    def _op_silu(self, instr: Instr, x: "Tensor") -> "Tensor":
        return orders.silu_exp2(x) if instr.attr("order") == "exp2" else self._by_reference(instr, [x])

    def _op_soft_cap(self, instr: Instr, x: "Tensor") -> "Tensor":
        exact = instr.attr("order") == "exp2"
        return orders.soft_cap_exp2(x, instr.attr("cap")) if exact else self._by_reference(instr, [x])

    def _op_silu_mul(self, instr: Instr, gate: "Tensor", up: "Tensor | None" = None) -> "Tensor":
        if instr.attr("order") != "exp2":
            return self._by_reference(instr, [gate, up])
        gate, up = halves(gate, up)
        return orders.silu_exp2(gate) * up

    def _op_gelu_mul(self, instr: Instr, gate: "Tensor", up: "Tensor | None" = None) -> "Tensor":
        if instr.attr("order") != "exp2":
            return self._by_reference(instr, [gate, up])
        gate, up = halves(gate, up)
        return orders.gelu_exp2(gate, instr.attr("tanh")) * up

    def _op_sigmoid_mul(self, instr: Instr, gate: "Tensor", up: "Tensor | None" = None) -> "Tensor":
        if instr.attr("order") != "exp2":
            return self._by_reference(instr, [gate, up])
        return state_orders.sigmoid_mul_exp2(*halves(gate, up))

    def _op_causal_conv(self, instr: Instr, x: "Tensor", state: StateStore) -> "tuple[Tensor, StateStore]":
        if instr.attr("order") != "taps":
            out, store = self._by_reference(instr, [x, state])
            return out, store
        w, *bias = (self.weights.tensor(name) for name in instr.weights)
        shift = bias[0] if bias else None
        return state_orders.causal_conv_taps(x, state, w, shift, instr.attr("layer"), instr.attr("silu"))

    def _op_delta_rule(
        self, instr: Instr, qkv: "Tensor", a: "Tensor", b: "Tensor", state: StateStore
    ) -> "tuple[Tensor, StateStore]":
        if instr.attr("order") != "tokens":
            out, store = self._by_reference(instr, [qkv, a, b, state])
            return out, store
        a_log, dt_bias = (self.weights.tensor(name) for name in instr.weights)
        layer, *heads, key_dim = map(instr.attr, ("layer", "key_heads", "value_heads", "key_dim"))
        sizes = layer, (heads[0], heads[1]), key_dim, instr.attr("eps"), instr.attr("tiled")
        return state_orders.delta_rule_tokens(qkv, (a, b, a_log, dt_bias), state, *sizes)

    def _op_selective_scan(
        self, instr: Instr, xbc: "Tensor", dt: "Tensor", state: StateStore
    ) -> "tuple[Tensor, StateStore]":
        if instr.attr("order") != "tokens":
            out, store = self._by_reference(instr, [xbc, dt, state])
            return out, store
        a_log, dt_bias, d = (self.weights.tensor(name) for name in instr.weights)
        shape, limits = (instr.attr("states"), instr.attr("groups")), (instr.attr("least"), instr.attr("most"))
        return state_orders.selective_scan_tokens(
            xbc, dt, (a_log, dt_bias, d), state, instr.attr("layer"), shape, limits
        )

    def _op_clamped_swiglu(self, instr: Instr, gate: "Tensor", up: "Tensor") -> "Tensor":
        if instr.attr("order") != "exp2":
            return self._by_reference(instr, [gate, up])
        return orders.clamped_swiglu_exp2(gate, up, instr.attr("limit"))

    def _op_rope(self, instr: Instr, x: "Tensor", positions: "Tensor", heads: int | None = None) -> "Tensor":
        import torch

        table = self.program.tables[instr.attr("table")]
        cos, sin = (torch.from_numpy(part) for part in cos_sin(table, positions.numpy()))
        return rotate(x.contiguous(), cos, sin, heads or instr.attr("heads"), table.style)

    def _op_scale_by_position(self, instr: Instr, x: "Tensor", positions: "Tensor") -> "Tensor":
        import torch

        factors = PositionFactors.of(instr.attrs)
        assert factors is not None, "the op has factors"
        return x * torch.from_numpy(factors.at(positions.numpy()))[:, None]

    def _op_rope_kv_write(
        self, instr: Instr, qkv: "Tensor", positions: "Tensor", cache: ReferencePages
    ) -> tuple[object, ...]:
        heads, kv_heads = instr.attr("heads"), cache.kv_heads
        q, k, v = split_heads(qkv, heads, kv_heads)
        is_normed, norm_last = bool(instr.weights), instr.attr("norm_last")
        if is_normed and not norm_last:
            q, k = self._op_rms_norm(instr, q, heads, 0), self._op_rms_norm(instr, k, kv_heads, 1)
        q, k = self._op_rope(instr, q, positions, heads), self._op_rope(instr, k, positions, kv_heads)
        if is_normed and norm_last:
            q, k = self._op_rms_norm(instr, q, heads, 0), self._op_rms_norm(instr, k, kv_heads, 1)
        q = self._op_scale_by_position(instr, q, positions) if instr.attr("beta") else q
        return q, self._op_kv_write(instr, cache, k, v)

    def _op_qkv_write(
        self, instr: Instr, qkv: "Tensor", cache: ReferencePages, positions: "Tensor | None" = None
    ) -> tuple[object, ...]:
        heads, kv_heads = instr.attr("heads"), cache.kv_heads
        q, k, v = split_heads(qkv, heads, kv_heads)
        if instr.weights:
            q, k = self._op_rms_norm(instr, q, heads, 0), self._op_rms_norm(instr, k, kv_heads, 1)
        q = q if positions is None else self._op_scale_by_position(instr, q, positions)
        return q, self._op_kv_write(instr, cache, k, v)

    def _op_rope_queries(self, instr: Instr, q: "Tensor", positions: "Tensor | None" = None) -> "Tensor":
        heads, norm_last = instr.attr("heads"), instr.attr("norm_last")
        if instr.weights and not norm_last:
            q = self._op_rms_norm(instr, q, heads)
        if positions is not None and instr.attr("table") is not None:
            q = self._op_rope(instr, q, positions, heads)
        if instr.weights and norm_last:
            q = self._op_rms_norm(instr, q, heads)
        return self._op_scale_by_position(instr, q, positions) if positions is not None and instr.attr("beta") else q

    def _op_kv_write(self, instr: Instr, cache: ReferencePages, k: "Tensor", v: "Tensor") -> KvCache:
        dtype = "f32" if instr.attr("kv_dtype") == "int8" else instr.attr("kv_dtype")  # an int8 cache quantises itself
        return kv_write(cache, k, v, instr.attr("layer"), dtype)

    def _op_attend(self, instr: Instr, q: "Tensor", cache: ReferencePages) -> "Tensor":
        import torch

        if instr.attr("order") not in CACHE_ORDERS.values():
            return self._by_reference(instr, [q, cache])
        heads, out = instr.attr("heads"), []
        slopes = log2_slopes(heads, instr.attr("first_head"), instr.attr("all_heads")) if instr.attr("alibi") else None
        bends = {"window": instr.attr("window"), "soft_cap": instr.attr("soft_cap"), "slopes": slopes}
        bends["sinks"] = self.weights.tensor(instr.weights[0]) if instr.weights else None
        for index, (start, stop, first) in enumerate(cache.segments):
            context = cache.read_stored(instr.attr("layer"), index).for_heads(heads)
            rows = q[start:stop].view(stop - start, heads, -1)
            at = first if instr.attr("causal") else None
            out.append(orders.attend_pages64(rows, context, at, instr.attr("scale"), **bends).flatten(1))
        return torch.cat(out)

    def _op_adapter_down(self, instr: Instr, x: "Tensor", rows: adapters.AdaptedRows) -> "Tensor":
        if instr.attr("order") != "lanes16":
            return self._by_reference(instr, [x, rows])
        return adapters.down(x, rows, instr.attr("group"), instr.attr("ranks"), orders.adapter_down_lanes16)

    def _op_adapter_up(self, instr: Instr, t: "Tensor", y: "Tensor", rows: adapters.AdaptedRows) -> "Tensor":
        if instr.attr("order") != "ranks":
            return self._by_reference(instr, [t, y, rows])
        return adapters.up(t, y, rows, instr.attr("group"), orders.adapter_up_ranks)

    def _op_all_reduce(self, instr: Instr, x: "Tensor") -> "Tensor":
        order = instr.attr("order")
        if self.group is None or not order:
            return registry.get("all_reduce").reference(x, instr.attr("ranks"), self.group)
        return self.group.sum(x, order)

    def _op_all_gather(self, instr: Instr, x: "Tensor") -> "Tensor":
        return registry.get("all_gather").reference(x, instr.attr("widths"), self.group)
