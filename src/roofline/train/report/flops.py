"""Counts the FLOPs of training on one token, by three conventions; every figure must name its convention.

foundry: LLM Foundry's (scripts/train/benchmarking/README.md, 2023). N are all parameters, tied ones once; attention is
counted as if it were not causal. With full activation checkpointing HFU is 4/3 of MFU.
torchtitan: torchtitan's (0.3, models/utils.py). As foundry, but without the parameters that are only looked up. It
defines no HFU, so foundry's rule is used.
matmul: ours, the multiplications that are executed. Model: linear layers, and attention over the keys that a token sees
(causal, windows). Hardware: also recomputed blocks, the scores that attention's backward pass recomputes, and masked
keys, if the kernel gets a mask and computes all of them.
lora: of runs that train an adapter, in place of foundry's and torchtitan's, which count a gradient of every parameter.
matmul leaves the gradients of frozen matrices out and counts the adapter's products.

No convention counts norms, activations or the optimizer. A row counts as one document.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from roofline.common.json_types import JsonMapping
from roofline.models.registry import configure
from roofline.models.spec import Param, expand
from roofline.program.ir import Program
from roofline.program.passes.price import mixture
from roofline.program.trace import trace_shape
from roofline.train.model.form import ParameterForm

Figures = TypeVar("Figures")

CONVENTIONS = {
    "foundry": "6 N + 12 L d T, N all parameters; HFU 4/3 of it with full checkpointing",
    "torchtitan": "6 (N - only looked up) + 12 L heads head_dim T; HFU 4/3 of it with full checkpointing",
    "matmul": "6 x linear layers + 12 L heads head_dim x mean keys seen; HFU: also what is computed again or hidden",
}
ADAPTED = {  # of runs that train an adapter
    "lora": "4 N_frozen + 6 N_trained + 12 L heads head_dim T, N without what is only looked up; HFU as torchtitan's",
    "matmul": "as of all parameters, but 4 x frozen layers, and 6 x those of the adapter",
}


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token, forward and backward. model: each product once; hardware: also repeated and masked ones."""

    model: float
    hardware: float


def per_token(
    config: JsonMapping,
    length: int,
    checkpointing: str | None = None,
    documents: bool = False,
    forms: "Mapping[str, ParameterForm]" = MappingProxyType({}),
) -> dict[str, Flops]:
    """The FLOPs of one token by each convention.

    Args:
        config: the canonical configuration of a model. length: tokens of a row.
        checkpointing: "full": blocks are recomputed; "selective": all but their products and attention are; None.
        documents: documents are kept apart, so attention gets a mask. forms: of frozen parameters, by name.
    """
    family, cfg = configure(config)
    params = [p for p in expand(family.spec(cfg), cfg.layers) if p.tied_to is None]
    program = trace_shape(family, cfg, "F32")
    every = sum(math.prod(p.shape) - _idle(program, p) for p in params)
    again = 4 / 3 if checkpointing == "full" else 1.0
    foundry = 6.0 * every + 12.0 * cfg.layers * cfg.width * length
    titan = 6.0 * (every - _only_looked_up(program)) + 12.0 * sum(map(cfg.q_width_of, range(cfg.layers))) * length
    products = _products(program, length, documents)
    if forms:
        return _adapted(params, program, forms, titan, products, checkpointing)
    block_passes = 4 if checkpointing == "full" else 3
    # Kernels recompute the scores, half of attention's products, in the backward pass.
    hardware = (
        block_passes * (products["blocks"] + products["computed"]) + 3 * products["head"] + products["computed"] / 2
    )
    return {
        "foundry": Flops(foundry, foundry * again),
        "torchtitan": Flops(titan, titan * again),
        "matmul": Flops(3 * (products["blocks"] + products["head"] + products["seen"]), hardware),
    }


def _adapted(
    params: Sequence[Param],
    program: Program,
    forms: "Mapping[str, ParameterForm]",
    titan: float,
    products: Mapping[str, float],
    checkpointing: str | None,
) -> dict[str, Flops]:
    """The FLOPs of one token where an adapter is trained. titan: torchtitan's, as if all parameters were."""
    met = sum(math.prod(p.shape) - _idle(program, p) for p in params) - _only_looked_up(program)
    trained = 0.0
    for param in params:
        form = forms[param.name]
        active = 1 - _idle(program, param) / math.prod(param.shape)
        trained += active * sum(math.prod(shape) for shape in form.trained.values())
    lora = titan - 2.0 * met + 6.0 * trained
    adapter = 2.0 * trained  # of a forward pass
    passes = 3 if checkpointing == "full" else 2
    model = 2 * (products["blocks"] + products["head"]) + 3 * (products["seen"] + adapter)
    hardware = passes * products["blocks"] + 2 * products["head"] + (passes + 1) * (products["computed"] + adapter)
    again = (4 / 3) if checkpointing == "full" else 1.0
    return {
        "lora": Flops(lora, lora * again),
        "matmul": Flops(model, hardware + products["computed"] / 2),
    }


def usual(flops: Mapping[str, Figures]) -> str:
    """The convention that is shown first: LLM Foundry's, or of an adapter LoRA's."""
    return "lora" if "lora" in flops else "foundry"


def _idle(program: Program, param: Param) -> int:
    """Of a parameter of experts, the elements that a token does not meet."""
    experts = mixture(program)
    if not param.experts or experts is None:
        return 0
    return math.prod(param.shape) // param.experts * (experts.experts - experts.top)


def mean_keys(length: int, window: int = 0) -> float:
    """The mean number of keys that a token of a row sees, with itself. window: as for `attend`, 0 for none."""
    most = min(window or length, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length


def _products(program: Program, length: int, documents: bool) -> dict[str, float]:
    """FLOPs of one token's forward pass: the linear layers of blocks and head, and attention over the keys that are
    seen, and over those that the kernel computes."""
    products = {"blocks": 0.0, "head": 0.0, "seen": 0.0, "computed": 0.0}
    types = program.types()
    for instr in program.body:
        flops = program.price(instr, types).flops
        if instr.op == "attend":
            window = instr.attr("window")
            masked = documents or window or instr.attr("alibi")
            products["seen"] += flops.pairs * mean_keys(length, window)
            products["computed"] += flops.pairs * (length if masked else mean_keys(length))
        elif any(len(program.weights[name].shape) > 1 for name in instr.weights):
            place = "blocks" if instr.weights[0].startswith("layers.") else "head"
            products[place] += flops.tokens + flops.rows
    return products


def _only_looked_up(program: Program) -> int:
    """The number of parameters in tables that no product reads."""
    looked = {name for instr in program.body if instr.op == "embed" for name in instr.weights}
    read = {name for instr in program.body if instr.op != "embed" for name in instr.weights}
    return sum(math.prod(program.weights[name].shape) for name in looked - read)
