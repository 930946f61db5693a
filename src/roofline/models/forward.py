"""The only layer loop."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch
from roofline.models.spec import Weights, expand, tree
from roofline.ops.symbol import TracedParameter, Value

Result = TypeVar("Result")


def call(function: Callable[..., Result], *args: object) -> Result:
    """How a block and the head are called unless someone wraps them (checkpointing, compilation, a loss in parts)."""
    return function(*args)


def forward(
    family: Family,
    cfg: ModelConfig,
    parameters: "Mapping[str, TracedParameter | Value]",
    batch: ForwardBatch,
    call_block: Callable[..., Value] = call,
) -> Value:
    """Logits [rows, vocab] of one step.

    parameters: canonical name -> torch tensor or Parameter, as the family's spec lists them (tied ones once).
    call_block(block, cfg, w, x, layer, batch) -> x runs each layer.
    """
    return run(family, cfg, tree(expand(family.spec(cfg), cfg.layers), parameters), batch, call_block)


def run(
    family: Family,
    cfg: ModelConfig,
    w: Weights,
    batch: ForwardBatch,
    call_block: Callable[..., Value] = call,
    call_head: Callable[..., Value] = call,
) -> Value:
    """The same on Weights; its layers are what call_block takes; call_head(head, cfg, w, x, batch) gives the result."""
    x = family.embed(cfg, w, batch)
    for layer in range(cfg.layers):
        x = call_block(family.block, cfg, w.layers[layer], x, layer, batch)
    return call_head(family.head, cfg, w, x, batch)
