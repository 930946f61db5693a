"""What one token of training costs, by three conventions that do not agree: a figure goes with the name of its own.

foundry: LLM Foundry's (scripts/train/benchmarking/README.md, 2023). N are all parameters, tied ones once, and attention
is counted without its causal half. Full activation checkpointing makes HFU 4/3 of MFU.
torchtitan: torchtitan's (0.3, models/utils.py). Parameters that are only looked up are left out; the causal half
is not. It has no HFU: foundry's rule is taken for it.
matmul: ours, the multiplications that are done. Model: linear layers, and attention over the keys that a token sees
(causal, windows). Hardware: also blocks computed again, the scores that attention's backward pass makes again, and the
hidden keys where the kernel is given a mask and computes them all.

None counts norms, activations or the optimizer. A row counts as one document.
"""

import math
from dataclasses import dataclass

from roofline.common.json_types import JsonMapping
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.program.ir import Program
from roofline.program.trace import trace_shape

CONVENTIONS = {
    "foundry": "6 N + 12 L d T, N all parameters; HFU 4/3 of it with full checkpointing",
    "torchtitan": "6 (N - only looked up) + 12 L heads head_dim T; HFU 4/3 of it with full checkpointing",
    "matmul": "6 x linear layers + 12 L heads head_dim x mean keys seen; HFU: also what is computed again or hidden",
}


@dataclass(frozen=True)
class Flops:
    """Of one token, forward and backward. model: each product once; hardware: also again, or for nothing."""

    model: float
    hardware: float


def per_token(
    config: JsonMapping, length: int, checkpointing: str | None = None, documents: bool = False
) -> dict[str, Flops]:
    """The FLOPs of one token by each convention.

    Args:
        config: the canonical configuration of a model. length: tokens of a row.
        checkpointing: "full": blocks are computed again; "selective": all of them but products and attention; None.
        documents: they are kept apart, so attention gets a mask.
    """
    family, cfg = configure(config)
    shapes = {p.name: p.shape for p in expand(family.spec(cfg), cfg.layers) if p.tied_to is None}
    program = trace_shape(family, cfg, "F32")
    every = sum(math.prod(shape) for shape in shapes.values())
    again = 4 / 3 if checkpointing == "full" else 1.0
    foundry = 6.0 * every + 12.0 * cfg.layers * cfg.width * length
    titan = 6.0 * (every - _only_looked_up(program)) + 12.0 * cfg.layers * cfg.q_width * length
    found = _multiplied(program, length, documents)
    block_passes = 4 if checkpointing == "full" else 3
    # No kernel keeps the scores, which are half of attention's products: its backward pass makes them again.
    hardware = block_passes * (found["blocks"] + found["computed"]) + 3 * found["head"] + found["computed"] / 2
    return {
        "foundry": Flops(foundry, foundry * again),
        "torchtitan": Flops(titan, titan * again),
        "matmul": Flops(3 * (found["blocks"] + found["head"] + found["seen"]), hardware),
    }


def mean_keys(length: int, window: int = 0) -> float:
    """Keys that the mean token of a row sees, itself among them; window: as `attend` has it, 0: all before it."""
    most = min(window or length, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length


def _multiplied(program: Program, length: int, documents: bool) -> dict[str, float]:
    """FLOPs of one token's forward pass: linear layers in blocks and head, attention over the keys that are seen, and
    over those that the kernel computes."""
    found = {"blocks": 0.0, "head": 0.0, "seen": 0.0, "computed": 0.0}
    types = program.types()
    for instr in program.body:
        flops = program.price(instr, types).flops
        if instr.op == "attend":
            window = instr.attr("window")
            masked = documents or window or instr.attr("alibi")
            found["seen"] += flops.pairs * mean_keys(length, window)
            found["computed"] += flops.pairs * (length if masked else mean_keys(length))
        elif any(len(program.weights[name].shape) > 1 for name in instr.weights):
            place = "blocks" if instr.weights[0].startswith("layers.") else "head"
            found[place] += flops.tokens + flops.rows
    return found


def _only_looked_up(program: Program) -> int:
    """Parameters of tables that no product reads."""
    looked = {name for instr in program.body if instr.op == "embed" for name in instr.weights}
    read = {name for instr in program.body if instr.op != "embed" for name in instr.weights}
    return sum(math.prod(program.weights[name].shape) for name in looked - read)
