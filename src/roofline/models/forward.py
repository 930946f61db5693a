"""The only layer loop, and the batch it runs on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roofline.models.config import ModelConfig
from roofline.models.registry import Family
from roofline.models.spec import expand, tree


@dataclass
class ForwardBatch:
    """One step as the families read it: torch tensors, or Symbols while tracing.

    ids, positions: int [tokens]; logit_rows: int [rows]; cache: a KvCache (ops/attention.py), replaced at every write.
    """

    ids: Any
    positions: Any
    logit_rows: Any
    cache: Any


def call(function: Callable[..., Any], *args: Any) -> Any:
    """How a block and the head are called unless someone wraps them (checkpointing, compilation, a loss in parts)."""
    return function(*args)


def forward(
    family: Family,
    cfg: ModelConfig,
    parameters: Mapping[str, Any],
    batch: ForwardBatch,
    call_block: Callable[..., Any] = call,
) -> Any:
    """Logits [rows, vocab] of one step.

    parameters: canonical name -> torch tensor or Parameter, as the family's spec lists them (tied ones once).
    call_block(block, cfg, w, x, layer, batch) -> x runs each layer.
    """
    return run(family, cfg, tree(expand(family.spec(cfg), cfg.layers), parameters), batch, call_block)


def run(
    family: Family,
    cfg: ModelConfig,
    w: Any,
    batch: ForwardBatch,
    call_block: Callable[..., Any] = call,
    call_head: Callable[..., Any] = call,
) -> Any:
    """The same on Weights; its layers are what call_block takes; call_head(head, cfg, w, x, batch) gives the result."""
    x = family.embed(cfg, w, batch)
    for layer in range(cfg.layers):
        x = call_block(family.block, cfg, w.layers[layer], x, layer, batch)
    return call_head(family.head, cfg, w, x, batch)
