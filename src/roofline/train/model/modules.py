"""Any family as torch modules: one for each block, whose forward is the family's; parameters as Hugging Face has them.

A block is the unit of sharding, activation checkpointing and compilation. It hands its parameters to one function of
tensors alone that all blocks share, so torch.compile compiles it once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from roofline.common.json_types import JsonMapping, JsonObject
from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch
from roofline.models.forward import run
from roofline.models.registry import configure
from roofline.models.spec import Param, Weights, expand, nest
from roofline.ops.attention import rope_angles
from roofline.ops.rows import Rows, TurnedPositions, score_bias
from roofline.train.model.blocked_attention import attend
from roofline.train.model.tensor_parallel import Part, Ranks, local_config, part, used
from roofline.weights.names import to_hf

IGNORED = -100  # a target that no token has: it adds nothing to a loss
LOGITS = 1 << 24  # elements of logits that are held at a time
LEAST_ROWS, MOST_ROWS = 1024, 4096  # with more, a sum over rows of one class leaves fp16, whatever the loss scale
BUDGET = 0.95  # of what torch.compile would keep for the backward pass: casts and gates are computed again


class Node(nn.Module):
    """A name in the path of a parameter."""


class Block(nn.Module):
    """One layer. forward: x [tokens, width] and the tensors of its batch -> x."""

    def __init__(self, table: Sequence[tuple[str, Part]], compute: Callable[..., Tensor], **made: Any) -> None:
        super().__init__()
        self.compute = compute
        self.places = [_place(self, name, held.local, **made) for name, held in table]

    def forward(self, x: Tensor, rows: tuple[int, int], *shared: Tensor | None) -> Tensor:
        # Looked up at every call: a sharded block's parameters are other tensors while it computes.
        return self.compute(rows, x, *shared, *(getattr(node, kind) for node, kind in self.places))


class Model(nn.Module):
    """A decoder to train.

    Args:
        config: the canonical configuration.
        device, dtype: of the parameters, which are left as they come: `train.init` fills them.
        ranks: those that share each block's matrices with this one.

    Attributes:
        blocks: the Blocks, in order. family, cfg: what they compute, on all ranks together.
        chunk_logits: the loss is taken from `chunk_rows` rows at a time; off: from all of them.
    """

    def __init__(
        self,
        config: JsonMapping,
        device: str | torch.device = "meta",
        dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.family, self.cfg = configure(config)
        self.ranks = ranks or Ranks()
        layered = tuple(p for p in self.family.spec(self.cfg) if p.name.startswith("layers.{layer}."))
        local = local_config(self.cfg, self.ranks)
        self.compute: Callable[..., Tensor] = partial(_block, self.family, local, self.ranks, layered)
        self.head_loss: Callable[..., Tensor] = partial(_head_loss, self.family, self.cfg)
        self.chunk_logits = True
        self.blocks: list[Block] = []
        self._top: list[tuple[str, tuple[nn.Module, str]]] = []
        made = {"device": device, "dtype": dtype}
        table = [p for p in expand(self.family.spec(self.cfg), self.cfg.layers) if p.tied_to is None]
        for layer in range(self.cfg.layers):
            rows = [(to_hf(self.cfg.family, p.name.format(layer=layer)), part(p, self.ranks)) for p in layered]
            stem = rows[0][0].split(f".{layer}.")[0]
            inside = [(name.removeprefix(f"{stem}.{layer}."), held) for name, held in rows]
            block = Block(inside, self._compute, **made)
            _node(self, stem).add_module(str(layer), block)
            self.blocks.append(block)
        for param in table:
            if not param.name.startswith("layers."):
                place = _place(self, to_hf(self.cfg.family, param.name), param.shape, **made)
                self._top.append((param.name, place))

    def canonical(self) -> Iterator[tuple[str, Param, nn.Parameter]]:
        """(name as torch has it, the spec's row, what this rank has of the parameter) of every parameter."""
        named = dict(self.named_parameters())
        for param in expand(self.family.spec(self.cfg), self.cfg.layers):
            if param.tied_to is None:
                name = to_hf(self.cfg.family, param.name)
                yield name, param, named[name]

    def forward(self, ids: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """The sum of the losses of all tokens, float32; without targets the logits [rows, length, vocab].

        ids, targets: int [rows, length]; a target of IGNORED does not count. documents: int [rows, length], the
        document of each token, where none may see another.
        """
        rows, length = ids.shape
        shared = self.shared(rows, length, ids.device, documents)
        w = self._weights()
        batch = ForwardBatch(ids.reshape(-1), shared[0], slice(None), None)

        def call_block(_: Any, __: Any, block: Block, x: Tensor, *rest: Any) -> Tensor:
            return block(x, (rows, length), *shared)

        def call_head(head: Any, cfg: ModelConfig, w: Any, x: Tensor, batch: ForwardBatch) -> Tensor:
            if targets is None:
                return head(cfg, w, x, batch).view(rows, length, -1)
            if not self.chunk_logits:
                return self._head_loss(targets.reshape(-1), x, *self._top_weights())
            held = (x, targets.reshape(-1), *self._top_weights())
            return ChunkedLoss.apply(self._head_loss, chunk_rows(cfg.vocab), *held)

        return run(self.family, self.cfg, w, batch, call_block, call_head)  # type: ignore[return-value]  # of tensors

    def logits(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Of rows x [n, width], from the weights that `head_loss` is called with: [n, vocab]."""
        w = _named(self.family, self.cfg, [name for name, _ in self._top], weights)
        batch = ForwardBatch(None, None, slice(None), None)
        return self.family.head(self.cfg, w, x, batch)  # type: ignore[return-value]  # of tensors

    def compile(self, **options: Any) -> None:
        """Compile the block, once for all of them, and the head with its loss."""
        self.compute = partial(_within_budget, torch.compile(self.compute, dynamic=False, **options))
        self.head_loss = torch.compile(self.head_loss, dynamic=False, **options)

    def checkpoint_activations(self, context: Callable[[], Any] | None = None) -> None:
        """Compute blocks again in the backward pass; context: what is kept all the same (selective checkpointing)."""
        compute = partial(self.compute, fused=True) if context else self.compute
        self.compute = partial(_checkpointed, compute, context)

    def _compute(self, *args: Any) -> Tensor:
        return self.compute(*args)

    def _head_loss(self, *args: Any) -> Tensor:
        return self.head_loss([name for name, _ in self._top], *args)

    def _top_weights(self) -> list[Tensor]:
        return [getattr(node, kind) for _, (node, kind) in self._top]

    def _weights(self) -> Weights:
        w = _named(self.family, self.cfg, [name for name, _ in self._top], self._top_weights())
        w.layers = self.blocks
        return w

    def shared(
        self, rows: int, length: int, device: torch.device, documents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """What all blocks read: positions [tokens], cos and sin of rope [tokens, head_dim / 2], a bias of scores."""
        positions = torch.arange(length, device=device).repeat(rows)
        turned = rope_angles(positions, self.cfg.rope) if self.cfg.positions == "rope" else (None, None)
        alibi = self.cfg.heads if self.cfg.positions == "alibi" else 0
        bias = score_bias(length, device, documents, self.cfg.sliding_window or 0, alibi)
        if bias is not None and alibi and self.ranks.size > 1:
            bias = bias.chunk(self.ranks.size, 1)[self.ranks.rank]
        return positions, *turned, bias


def chunk_rows(vocab: int) -> int:
    """Rows whose logits are held at a time: with fewer, adding up gradients of the head would take longer."""
    return min(MOST_ROWS, max(LEAST_ROWS, LOGITS // vocab))


def _within_budget(compiled: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with functorch_config.patch(activation_memory_budget=BUDGET):  # read by the first call, which compiles
        return compiled(*args, **kwargs)


class ChunkedLoss(torch.autograd.Function):
    """A loss over many rows whose logits are never there at once: the forward pass takes gradients chunk by chunk.

    Saves memory as Liger's fused linear cross-entropy does (Hsu et al. 2024), for whatever head a family has.
    """

    @staticmethod
    def forward(ctx: Any, loss: Any, chunk: int, x: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        total = torch.zeros((), device=x.device)
        into_x = torch.empty_like(x) if wanted else None
        # In float32: chunk by chunk, parameters in 16 bits would lose what is small beside the sum.
        into_weights = [torch.zeros_like(w, dtype=torch.float32) for w in weights] if wanted else []
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad() if wanted else nullcontext():
                inputs = [
                    x[part].detach().requires_grad_(wanted),
                    *(w.detach().requires_grad_(wanted) for w in weights),
                ]
                found = loss(targets[part], *inputs)
            total += found.detach()
            if into_x is not None:
                got = torch.autograd.grad(found, inputs, allow_unused=True)
                into_x[part] = got[0]
                for sum_, grad in zip(into_weights, got[1:], strict=True):
                    if grad is not None:
                        sum_ += grad
        sums = [sum_.to(w.dtype) for sum_, w in zip(into_weights, weights, strict=False)]
        ctx.save_for_backward(*([into_x, *sums] if into_x is not None else []))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scaled = [saved.mul_(grads[0]) for saved in ctx.saved_tensors]
        return None, None, scaled[0], None, *scaled[1:]


def _block(
    family: Family,
    cfg: ModelConfig,
    ranks: Ranks,
    table: Sequence[Param],
    rows: tuple[int, int],
    x: Tensor,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    *parameters: Tensor,
    fused: bool = False,
) -> Tensor:
    at = positions if cos is None or sin is None else TurnedPositions(cos, sin)
    # Selective checkpointing keeps the result of an attention that is one op.
    batch = ForwardBatch(None, at, slice(None), Rows(*rows, cfg.kv_heads, bias, attend=None if fused else attend))
    w = nest(
        [param.name.removeprefix("layers.{layer}.") for param in table],
        [used(param, tensor, ranks) for param, tensor in zip(table, parameters, strict=True)],
    )
    # Layer 0 for all: nothing is kept under that number, and with another each layer would be compiled by itself.
    return family.block(cfg, w, x, 0, batch)  # type: ignore[return-value]  # of tensors


def _head_loss(
    family: Family, cfg: ModelConfig, names: list[str], targets: Tensor, x: Tensor, *weights: Tensor
) -> Tensor:
    w = _named(family, cfg, names, weights)
    logits: Any = family.head(cfg, w, x, ForwardBatch(None, None, slice(None), None))
    return cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _named(family: Family, cfg: ModelConfig, names: Sequence[str], values: Sequence[Tensor]) -> Any:
    """Weights of what is not in a layer; a tied head is the embedding."""
    tied = [p for p in family.spec(cfg) if p.tied_to is not None]
    found = dict(zip(names, values, strict=True))
    return nest([*found, *(p.name for p in tied)], [*found.values(), *(found[str(p.tied_to)] for p in tied)])


def _checkpointed(
    compute: Callable[..., Tensor],
    context: Callable[[], Any] | None,
    rows: tuple[int, int],
    *tensors: Tensor | None,
) -> Tensor:
    options: JsonObject = {"context_fn": context} if context else {}
    block = partial(compute, rows)
    return checkpoint(block, *tensors, use_reentrant=False, preserve_rng_state=False, **options)


def _node(root: nn.Module, path: str) -> nn.Module:
    for step in path.split("."):
        if not hasattr(root, step):
            root.add_module(step, Node())
        root = getattr(root, step)
    return root


def _place(root: nn.Module, name: str, shape: tuple[int, ...], **made: Any) -> tuple[nn.Module, str]:
    stem, _, kind = name.rpartition(".")
    node = _node(root, stem)
    node.register_parameter(kind, nn.Parameter(torch.empty(shape, **made)))
    return node, kind
