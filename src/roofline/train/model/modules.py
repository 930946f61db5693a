"""Any model family as torch modules, with the parameter names of Hugging Face.

There is a module for each block, whose forward is the family's. A block is the unit of sharding, activation
checkpointing and compilation. All blocks hand their parameters to one shared function of tensors, so that torch.compile
compiles it once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, noop_context_fn

from roofline.common.json_types import JsonMapping
from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch
from roofline.models.forward import run
from roofline.models.registry import configure
from roofline.models.spec import Param, Weights, expand, nest
from roofline.ops.attention import rope_angles
from roofline.ops.rows import Rows, TurnedPositions, score_bias
from roofline.train.model.blocked_attention import attend
from roofline.train.model.chunked_loss import ChunkedLoss, chunk_rows
from roofline.train.model.cross_entropy import IGNORED, cross_entropy
from roofline.train.model.tensor_parallel import Part, Ranks, family_form, local_config, part
from roofline.weights.names import to_hf

BUDGET = 0.95  # of what torch.compile would keep for the backward pass; casts and gates are recomputed instead

Device = str | torch.device
Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class Node(nn.Module):
    """A step in the dotted name of a parameter."""


class Block(nn.Module):
    """One layer. forward: x [tokens, width] and the tensors that all blocks share -> x.

    Args:
        parts: (name below the block, this rank's part) of each parameter.
        compute: the function that all blocks hand their tensors to.
    """

    def __init__(
        self, parts: Sequence[tuple[str, Part]], compute: Callable[..., Tensor], device: Device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.compute = compute
        self.places = [_add_parameter(self, name, part_.local, device, dtype) for name, part_ in parts]

    def forward(self, x: Tensor, rows: tuple[int, int, int], *shared: Tensor | None) -> Tensor:
        # Parameters are looked up at every call: while a sharded block computes, they are other tensors.
        return self.compute(rows, x, *shared, *(getattr(node, kind) for node, kind in self.places))


class Model(nn.Module):
    """A decoder to train.

    Args:
        config: the canonical configuration.
        device, dtype: of the parameters, which are not initialised: `model.init` fills them.
        ranks: the ranks that share each block's matrices with this one.

    Attributes:
        blocks: the Blocks, in order. family, cfg: the family, and the shape of the model on all ranks together.
        chunk_logits: compute the loss from `chunk_rows` rows at a time instead of from all.
        compute, head_loss: the functions that every block, and the head with its loss, go through; may be wrapped.
        restarts: positions are counted anew in each document.
        watch: called before and behind every block in both passes, and before each chunk of logits; may raise.
    """

    def __init__(
        self, config: JsonMapping, device: Device = "meta", dtype: torch.dtype = torch.float32, ranks: Ranks = Ranks()
    ) -> None:
        super().__init__()
        self.family, self.cfg = configure(config)
        self.ranks = ranks
        table = self.family.spec(self.cfg)
        layered = tuple(p for p in table if p.name.startswith("layers.{layer}."))
        outer = [p for p in table if p.tied_to is None and not p.name.startswith("layers.")]
        spec = _BlockSpec(self.family, local_config(self.cfg, self.ranks), self.ranks, layered)
        self.compute: Callable[..., Tensor] = partial(_block, spec)
        self._outer_names = tuple(p.name for p in outer)
        self.head_loss: Callable[..., Tensor] = partial(_head_loss, self.family, self.cfg, self._outer_names)
        self.chunk_logits = True
        self.restarts = False
        self.watch: Callable[[], None] | None = None
        self.blocks: list[Block] = []
        for layer in range(self.cfg.layers):
            named = [(p.name.format(layer=layer), p) for p in layered if p.is_of(layer)]
            rows = [(to_hf(self.cfg.family, name), part(p, self.ranks)) for name, p in named]
            stem = rows[0][0].split(f".{layer}.")[0]
            parts = [(name.removeprefix(f"{stem}.{layer}."), part_) for name, part_ in rows]
            block = Block(parts, lambda *tensors: self.compute(*tensors), device, dtype)
            _node(self, stem).add_module(str(layer), block)
            self.blocks.append(block)
        self._outer = [_add_parameter(self, to_hf(self.cfg.family, p.name), p.shape, device, dtype) for p in outer]

    def canonical(self) -> Iterator[tuple[str, Param, nn.Parameter]]:
        """(name in torch, the spec's row, this rank's tensor) of every parameter."""
        parameters = dict(self.named_parameters())
        for param in expand(self.family.spec(self.cfg), self.cfg.layers):
            if param.tied_to is None:
                name = to_hf(self.cfg.family, param.name)
                yield name, param, parameters[name]

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses of all tokens, float32; without targets the logits [rows, length, vocab].

        ids, targets: int [rows, length]; a target of IGNORED does not count. documents: int [rows, length], the
        document of each token, if tokens of one document must not see those of another. places: int [n], the tokens
        behind which logits are computed, [n, vocab], counted through all rows; without targets.
        """
        rows, length = ids.shape
        kinds = [self.cfg.alike(layer) for layer in range(self.cfg.layers)]
        shared = {kind: self.shared(rows, length, ids.device, documents, kind) for kind in set(kinds)}
        outer = [getattr(node, kind) for node, kind in self._outer]
        w = _outer_weights(self.family, self.cfg, self._outer_names, outer)
        w.layers = self.blocks  # type: ignore[attr-defined]
        batch = ForwardBatch(ids.reshape(-1), shared[0][0], slice(None) if places is None else places, None)

        def call_block(_: object, __: object, block: Block, x: Tensor, layer: int, batch: object) -> Tensor:
            return self._watched(block(x, (rows, length, kinds[layer]), *shared[kinds[layer]]))

        def call_head(
            head: Callable[..., Tensor], cfg: ModelConfig, w: Weights, x: Tensor, batch: ForwardBatch
        ) -> Tensor:
            if targets is None:
                logits = head(cfg, w, x, batch)
                return logits.view(rows, length, -1) if places is None else logits
            if not self.chunk_logits:
                return self.head_loss(targets.reshape(-1), x, *outer)
            trains = torch.is_grad_enabled()
            return ChunkedLoss.apply(self._chunk_loss, chunk_rows(cfg.vocab), trains, x, targets.reshape(-1), *outer)

        return run(self.family, self.cfg, w, batch, call_block, call_head)  # type: ignore[return-value]  # of tensors

    def _chunk_loss(self, *tensors: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch()
        return self.head_loss(*tensors)

    def _watched(self, x: Tensor) -> Tensor:
        """x itself; `watch` is called now, and when its gradient is there."""
        watch = self.watch
        if watch is not None:
            watch()
            if x.requires_grad:
                x.register_hook(lambda grad: watch())
        return x

    def logits(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The logits [n, vocab] of rows x [n, width], from the weights that `head_loss` is called with."""
        return _logits(self.family, self.cfg, self._outer_names, x, weights)

    def shared(
        self, rows: int, length: int, device: torch.device, documents: Tensor | None, layer: int = 0
    ) -> tuple[Tensor | None, ...]:
        """What all blocks like that of a layer read: positions [tokens], cos and sin of rope [tokens, turned / 2], a
        bias of scores."""
        positions = torch.arange(length, device=device).repeat(rows)
        if self.restarts and documents is not None:
            positions = _within_documents(documents).reshape(-1)
        table = self.cfg.rope_of(layer)
        cos, sin = rope_angles(positions, table) if table is not None else (None, None)
        alibi_heads = self.cfg.heads if self.cfg.positions == "alibi" else 0
        bias = score_bias(length, device, documents, self.cfg.window(layer), alibi_heads)
        if bias is not None and alibi_heads and self.ranks.size > 1:
            bias = bias.chunk(self.ranks.size, 1)[self.ranks.rank]
        return positions, cos, sin, bias

    def compile(self, backend: str, mode: str | None = None) -> None:
        """Compile the block, once for all of them, and the head with its loss."""
        self.compute = partial(_within_budget, torch.compile(self.compute, dynamic=False, backend=backend, mode=mode))
        self.head_loss = torch.compile(self.head_loss, dynamic=False, backend=backend, mode=mode)

    def checkpoint_activations(self, context: Contexts | None = None) -> None:
        """Recompute blocks in the backward pass; context: says what to keep all the same (selective checkpointing)."""
        compute = partial(self.compute, fused=True) if context else self.compute
        self.compute = partial(_checkpointed, compute, context)


@dataclass(frozen=True)
class _BlockSpec:
    """What all blocks of a model have in common. cfg: the shape of this rank's share. table: rows of all layers."""

    family: Family
    cfg: ModelConfig
    ranks: Ranks
    table: tuple[Param, ...]


def _block(
    spec: _BlockSpec,
    rows: tuple[int, int, int],
    x: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    *parameters: Tensor,
    fused: bool = False,
) -> Tensor:
    """A layer of the family on x [tokens, width]; rows: how many, of which length, and the first layer like this one;
    fused: with torch's own attention."""
    count, length, layer = rows
    at = positions if cos is None or sin is None else TurnedPositions(cos, sin)
    # Selective checkpointing can keep the result of an attention only if it is one op.
    batch = ForwardBatch(
        None, at, slice(None), Rows(count, length, spec.cfg.kv_heads, bias, attend=None if fused else attend)
    )
    table = [param for param in spec.table if param.is_of(layer)]
    w = nest(
        [param.name.removeprefix("layers.{layer}.") for param in table],
        [family_form(param, tensor, spec.ranks) for param, tensor in zip(table, parameters, strict=True)],
    )
    # The cache keeps nothing, so layers that are alike may be one; another number would compile each layer by itself.
    return spec.family.block(spec.cfg, w, x, layer, batch)  # type: ignore[return-value]  # of tensors


def _within_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, int64 [rows, length], of documents [rows, length]."""
    at = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values


def _head_loss(
    family: Family, cfg: ModelConfig, names: Sequence[str], targets: Tensor, x: Tensor, *weights: Tensor
) -> Tensor:
    logits = _logits(family, cfg, names, x, weights)
    if torch.compiler.is_compiling():  # the compiler fuses torch's own, and needs one tensor of logits, too
        return nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    return cross_entropy(logits, targets)


def _logits(family: Family, cfg: ModelConfig, names: Sequence[str], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    w = _outer_weights(family, cfg, names, weights)
    return cast(Tensor, family.head(cfg, w, x, ForwardBatch(None, None, slice(None), None)))


def _outer_weights(family: Family, cfg: ModelConfig, names: Sequence[str], values: Sequence[Tensor]) -> Weights:
    """The Weights outside of layers; a tied head is the embedding."""
    tied = [p for p in family.spec(cfg) if p.tied_to is not None]
    tensors = dict(zip(names, values, strict=True))
    weights: Weights = nest(
        [*tensors, *(p.name for p in tied)], [*tensors.values(), *(tensors[str(p.tied_to)] for p in tied)]
    )
    return weights


def _within_budget(compiled: Callable[..., Tensor], *tensors: object) -> Tensor:
    with functorch_config.patch(activation_memory_budget=BUDGET):  # read by the first call, which compiles
        return compiled(*tensors)


def _checkpointed(
    compute: Callable[..., Tensor], context: Contexts | None, rows: tuple[int, int, int], *tensors: Tensor | None
) -> Tensor:
    context_fn = context or noop_context_fn
    block = partial(compute, rows)
    return checkpoint(block, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)


def _node(root: nn.Module, path: str) -> nn.Module:
    for step in path.split("."):
        if not hasattr(root, step):
            root.add_module(step, Node())
        root = getattr(root, step)
    return root


def _add_parameter(
    root: nn.Module, name: str, shape: tuple[int, ...], device: Device, dtype: torch.dtype
) -> tuple[nn.Module, str]:
    """The module below `root` that now has the parameter, and its name there."""
    stem, _, kind = name.rpartition(".")
    node = _node(root, stem)
    node.register_parameter(kind, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
    return node, kind
