"""The least time that prefill and decoding of a model can take on a chip, whose roofs are measured here: its products
at one roof, its bytes at the other.

FLOPs are the model's own, each product once: linear layers, and attention over the keys that a token sees. Bytes are
the weights once a step, and the keys and values that are read and written. Norms and activations count in neither.
"""

import importlib.util
from dataclasses import dataclass, replace

from roofline.common.json_types import JsonMapping
from roofline.models.registry import configure
from roofline.program.ir import Instr, Program, kv_group_of
from roofline.program.passes.price import Amount, Price, mixture, price, segment_work, step_work, window_of
from roofline.program.trace import trace_shape

FORM, KV = "BF16", "bf16"


@dataclass(frozen=True)
class Speed:
    """What a chip was measured to do: flops a second of bf16 products, bytes a second at the working set asked for;
    source: how they were measured."""

    flops: float
    bytes_per_s: float
    source: str


class Speeds:
    """Measures a chip ("cpu" or "cuda") when made and again by `best`: just before and just after what is timed.

    working_set: bytes that a step reads; a CPU's caches make small ones faster. threads: of a CPU.
    """

    def __init__(self, device: str, working_set: int, threads: int | None = None) -> None:
        self._measured_for = device, working_set, threads
        self._before = _measure(*self._measured_for)

    def best(self) -> Speed:
        """The higher figure of each roof."""
        before, after = self._before, _measure(*self._measured_for)
        return Speed(max(before.flops, after.flops), max(before.bytes_per_s, after.bytes_per_s), after.source)


def _measure(device: str, working_set: int, threads: int | None) -> Speed:
    if device == "cpu" and importlib.util.find_spec("roofline._native") is not None:
        from roofline.backends.cpu.roofs import measure_roofs as measure_loops

        roofs = measure_loops(quick=True, threads=threads, reads=(working_set,))
        source = f"register-only bf16 loops and reads, {roofs.isa}, {roofs.threads} threads"
        return Speed(roofs.bf16_flops, roofs.read_bytes_per_s(working_set), source)
    from roofline.backends.gpu.measure.roofs import measure_roofs

    measured = measure_roofs(device)
    return Speed(measured.flops, measured.bytes_per_s, f"torch: a bf16 product of side {measured.side}, a copy")


@dataclass(frozen=True)
class WorkLimit:
    """seconds: the least for the work; bound: "compute" or "bandwidth"; flops, bytes: of the work."""

    seconds: float
    bound: str
    flops: float
    bytes: float


class LatencyLimits:
    """The limits of a configuration with 16-bit weights and cache.

    Args:
        config: canonical, as `models.registry.configure` takes it.
    """

    def __init__(self, config: JsonMapping) -> None:
        family, cfg = configure(config)
        program = trace_shape(family, cfg, FORM)
        priced = price(program)
        products = tuple(instr for instr in priced.instrs if instr[0].op == "attend" or _multiplies(program, instr[0]))
        self._products, self._all, self._experts = Price(products, 0, ()), priced, mixture(program)
        groups = {name: replace(group, format=KV) for name, group in program.kv_groups.items()}
        layer_bytes = {name: replace(group, layers=1).token_bytes for name, group in groups.items()}
        attends = [instr for instr, _ in priced.instrs if instr.op == "attend"]
        # Of each layer that attends: its window, and bytes of a token in its cache.
        self._read = [(window_of(instr), layer_bytes[kv_group_of(instr.inputs[1])]) for instr in attends]
        self.kv_token_bytes = sum(group.token_bytes for group in groups.values())
        self.weight_bytes = priced.weight_bytes

    def step(self, batch: int, tokens: int, context: int, speed: Speed) -> WorkLimit:
        """One step of `batch` sequences with `tokens` new tokens each after `context`, one logit row of each."""
        flops, moved = self.work(batch, tokens, context)
        compute, move = flops / speed.flops, moved / speed.bytes_per_s
        return WorkLimit(max(compute, move), "compute" if compute > move else "bandwidth", flops, moved)

    def steps(self, batch: int, context: int, count: int, speed: Speed) -> WorkLimit:
        """`count` decoding steps, the first after `context` tokens."""
        parts = [self.step(batch, 1, context + i, speed) for i in range(count)]
        seconds, flops, moved = (sum(getattr(part, name) for part in parts) for name in ("seconds", "flops", "bytes"))
        return WorkLimit(seconds, parts[-1].bound, flops, moved)

    def work(self, batch: int, tokens: int, context: int) -> tuple[float, float]:
        """(FLOPs, bytes) of a step."""
        work = step_work(batch * tokens, batch, [(context, tokens)] * batch, self._all.windows, self._experts)
        total: Amount = self._all.amount(work)
        kv = self.kv_token_bytes * (batch * tokens) + self._kv_read(batch, tokens, context)
        return float(self._products.amount(work).flops), float(total.weight_bytes + kv)

    def _kv_read(self, batch: int, tokens: int, context: int) -> int:
        """Bytes of keys and values that all layers read."""
        return batch * sum(segment_work(context, tokens, window)[0] * size for window, size in self._read)


def _multiplies(program: Program, instr: Instr) -> bool:
    return instr.op != "embed" and any(len(program.weights[name].shape) > 1 for name in instr.weights)
