"""Any model family as torch modules, with the parameter names of Hugging Face.

There is a module for each block, whose forward is the family's. A block is the unit of sharding, activation
checkpointing and compilation. All blocks hand their parameters to one shared function of tensors, so that torch.compile
compiles it once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, noop_context_fn

from roofline.common.json_types import JsonMapping
from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch, LayerInputs
from roofline.models.forward import run
from roofline.models.registry import configure
from roofline.models.spec import Param, Weights, expand, nest
from roofline.ops.attention import rope_angles
from roofline.ops.own_weight import OwnWeight
from roofline.ops.rows import Rows, TurnedPositions, score_bias
from roofline.ops.state_rows import StateRows
from roofline.train.model.adapted import Casts, weight_of
from roofline.train.model.blocked_attention import attend
from roofline.train.model.chunked_loss import ChunkedLoss, chunk_rows
from roofline.train.model.cross_entropy import IGNORED, cross_entropy
from roofline.train.model.form import ParameterForm, beside, trained_rows
from roofline.train.model.objective import TrainingObjective, objective_loss
from roofline.train.model.tensor_parallel import TensorRanks, family_form, local_config, part
from roofline.train.model.widen import PLAIN
from roofline.weights.names import to_hf

SHARED = 6  # tensors that all blocks like one read, and what one takes in beside them
KEYS = 2  # behind them: the keys and values that another block wrote, None where a block has its own
BUDGET = 0.95  # of what torch.compile would keep for the backward pass; casts and gates are recomputed instead

Device = str | torch.device
BlockFunction = Callable[..., Tensor | tuple[Tensor, ...]]
Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class Node(nn.Module):
    """A step in the dotted name of a parameter."""


class Block(nn.Module):
    """One layer. forward: x [tokens, width], the tensors that all blocks share, and keys and values of another block ->
    x; of a block whose keys and values others read these, too.

    Args:
        tensors: (name below the block, how it is made) of each tensor of its parameters.
        compute: the function that all blocks hand their tensors to.
    """

    def __init__(self, tensors: Sequence[tuple[str, "_Made"]], compute: BlockFunction, device: Device) -> None:
        super().__init__()
        self.compute = compute
        self.places = [_add_parameter(self, name, made, device) for name, made in tensors]

    def forward(self, x: Tensor, rows: tuple[int, int, int], *shared: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        # Parameters are looked up at every call: while a sharded block computes, they are other tensors.
        return self.compute(rows, x, *shared, *(getattr(node, kind) for node, kind in self.places))


class Model(nn.Module):
    """A decoder to train.

    Args:
        config: the canonical configuration.
        device, dtype: of the parameters, which are not initialised: `model.init` fills them.
        ranks: the ranks that share each block's matrices with this one.
        forms: how each parameter is frozen and adapted, by its canonical name; without them all are trained.

    Attributes:
        blocks: the Blocks, in order. kinds: of each the number of the first block that computes like it. family, cfg:
            the family, and the shape of the model on all ranks together.
        chunk_logits: compute the loss from `chunk_rows` rows at a time instead of from all.
        compute, head_loss: the functions that every block, and the head with its loss, go through; may be wrapped.
        restarts: positions are counted anew in each document. skips: no logits of tokens whose target is IGNORED are
            computed, so the shapes of the head's tensors differ from batch to batch.
        watch: called before and behind every block in both passes, and before each chunk of logits; may raise.
    """

    def __init__(
        self,
        config: JsonMapping,
        device: Device = "meta",
        dtype: torch.dtype = torch.float32,
        ranks: TensorRanks = TensorRanks(),
        forms: Mapping[str, ParameterForm] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.family, self.cfg = configure(config)
        self.ranks, self.forms = ranks, forms
        table = self.family.spec(self.cfg)
        layered = tuple(p for p in table if p.name.startswith("layers.{layer}."))
        outer = [p for p in table if p.tied_to is None and not p.name.startswith("layers.")]
        spec = _BlockSpec(self.family, local_config(self.cfg, self.ranks), self.ranks, layered, forms)
        self.compute: BlockFunction = partial(_block, spec)
        self._head = _HeadSpec(self.family, self.cfg, tuple(p.name for p in outer), forms)
        self.head_loss: Callable[..., Tensor] = partial(_head_loss, self._head)
        self.chunk_logits = True
        self.restarts = self.skips = False
        self.watch: Callable[[], None] | None = None
        self.blocks: list[Block] = []
        for layer in range(self.cfg.layers):
            rows = [row for p in spec.of(layer) for row in self._tensors(p, dtype)]
            stem = rows[0][0].split(f".{layer}.")[0]
            tensors = [(name.removeprefix(f"{stem}.{layer}."), made) for name, made in rows]
            block = Block(tensors, lambda *tensors: self.compute(*tensors), device)
            _node(self, stem).add_module(str(layer), block)
            self.blocks.append(block)
        self._outer = [
            _add_parameter(self, name, made, device) for p in outer for name, made in self._tensors(p, dtype)
        ]
        layers = range(self.cfg.layers)
        alike = [(self.cfg.alike(layer), layer in spec.sources, spec.forms_of(layer)) for layer in layers]
        self.kinds = [alike.index(each) for each in alike]

    def _tensors(self, param: Param, dtype: torch.dtype) -> list[tuple[str, "_Made"]]:
        """(name in torch, how it is made) of each tensor of a parameter; those that it is frozen in first."""
        form, name = self.forms.get(param.name), to_hf(self.cfg.family, param.name)
        if form is None:
            return [(name, _Made(part(param, self.ranks).local, dtype, not param.fixed))]
        rows = [(name, _Made(form.stored, PLAIN.get(form.format, torch.uint8), False))]
        kind = dtype if dtype.is_floating_point else torch.float32
        return rows + [(beside(name, each), _Made(shape, kind, True)) for each, shape in form.trained.items()]

    def canonical(self) -> Iterator[tuple[str, Param, nn.Parameter]]:
        """(name in torch, the spec's row, this rank's tensor) of every parameter that is trained, or that no loss
        has a gradient for; an adapter's have rows of their own, named as the matrix is: layers.0.attn.q.lora_A."""
        parameters = dict(self.named_parameters())
        for param in self.table():
            name, form = to_hf(self.cfg.family, param.name), self.forms.get(param.name)
            if form is None:
                yield name, param, parameters[name]
                continue
            for name, row in trained_rows(self.cfg.family, param, form):
                yield name, row, parameters[name]

    def frozen(self) -> Iterator[tuple[Param, ParameterForm, nn.Parameter]]:
        """(the spec's row, its form, this rank's tensor) of every parameter that is not trained."""
        parameters = dict(self.named_parameters())
        for param in self.table():
            if param.name in self.forms:
                yield param, self.forms[param.name], parameters[to_hf(self.cfg.family, param.name)]

    def table(self) -> list[Param]:
        """The rows of all parameters, tied ones once."""
        return [param for param in expand(self.family.spec(self.cfg), self.cfg.layers) if param.tied_to is None]

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        places: Tensor | None = None,
        objective: TrainingObjective | None = None,
    ) -> Tensor:
        """The sum of the losses of all tokens, float32; without targets the logits [rows, length, vocab].

        ids, targets: int [rows, length]; a target of IGNORED does not count. documents: int [rows, length], the
        document of each token, if tokens of one document must not see those of another. places: int [n], the tokens
        behind which logits are computed, [n, vocab], counted through all rows; without targets. objective: its value is
        the result, instead of the sum of losses.
        """
        rows, length = ids.shape
        kinds = self.kinds
        shared = {kind: self.shared(rows, length, ids.device, documents, kind) for kind in set(kinds)}
        outer = [getattr(node, kind) for node, kind in self._outer]
        w = self._head.weights(outer)
        w.layers = self.blocks  # type: ignore[attr-defined]
        batch = ForwardBatch(ids.reshape(-1), shared[0][0], slice(None) if places is None else places, None)
        written: dict[int, Sequence[Tensor | None]] = {}  # keys and values, by the layer that others read them of

        def call_block(_: object, __: object, block: Block, x: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
            keys = written.get(self.cfg.kv_source(layer), (None, None))
            layer_input = None if batch.by_layer is None else batch.by_layer.of(layer)
            out = block(x, (rows, length, kinds[layer]), *shared[kinds[layer]][:-1], layer_input, *keys)
            if isinstance(out, tuple):
                out, *written[layer] = out
            return self._watched(out)

        def call_head(
            head: Callable[..., Tensor], cfg: ModelConfig, w: Weights, x: Tensor, batch: ForwardBatch
        ) -> Tensor:
            if targets is None:
                logits = head(cfg, w, x, batch)
                return logits.view(rows, length, -1) if places is None else logits
            if objective is not None:
                return objective_loss(objective, self._watched_logits, chunk_rows(cfg.vocab), x, targets, outer)
            goals = targets.reshape(-1)
            if self.skips:
                counted = (goals != IGNORED).nonzero()[:, 0]
                x, goals = x[counted], goals[counted]
            if not self.chunk_logits:
                return self.head_loss(goals, x, *outer)
            trains = torch.is_grad_enabled()
            return ChunkedLoss.apply(self._chunk_loss, chunk_rows(cfg.vocab), trains, x, goals, *outer)

        return run(self.family, self.cfg, w, batch, call_block, call_head)  # type: ignore[return-value]  # of tensors

    def _watched_logits(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        if self.watch is not None:
            self.watch()
        return self.logits(x, weights)

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
        return self._head.logits(x, weights)

    def shared(
        self, rows: int, length: int, device: torch.device, documents: Tensor | None, layer: int = 0
    ) -> tuple[Tensor | None, ...]:
        """What all blocks like that of a layer read: positions [tokens], cos and sin of rope [tokens, turned / 2], a
        bias of scores, the place of each token in its document [rows, length], which layers with state read alone, and
        a place for what a block takes in for itself.
        """
        positions = torch.arange(length, device=device).repeat(rows)
        places = None if documents is None else _within_documents(documents)
        if self.restarts and places is not None:
            positions = places.reshape(-1)
        table = self.cfg.rope_of(layer)
        cos, sin = rope_angles(positions, table) if table is not None else (None, None)
        if not self.cfg.keeps_state(layer):
            places = None
        elif not self.cfg.attends(layer):
            return positions, cos, sin, None, places, None
        alibi_heads = self.cfg.heads if self.cfg.positions == "alibi" else 0
        bias = score_bias(length, device, documents, self.cfg.window(layer), alibi_heads)
        if bias is not None and alibi_heads and self.ranks.size > 1:
            bias = bias.chunk(self.ranks.size, 1)[self.ranks.rank]
        return positions, cos, sin, bias, places, None

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
    ranks: TensorRanks
    table: tuple[Param, ...]
    forms: Mapping[str, ParameterForm] = field(default_factory=dict)

    @cached_property
    def sources(self) -> frozenset[int]:
        """The layers whose keys and values others read."""
        layers = range(self.cfg.layers)
        return frozenset(self.cfg.kv_source(layer) for layer in layers if self.cfg.kv_source(layer) != layer)

    def of(self, layer: int) -> list[Param]:
        """The rows of a layer, with its number."""
        return [replace(p, name=p.name.format(layer=layer)) for p in self.table if p.is_of(layer)]

    def forms_of(self, layer: int) -> list[ParameterForm | None]:
        """The forms of a layer's parameters."""
        return [self.forms.get(param.name) for param in self.of(layer)]


@dataclass(frozen=True)
class _HeadSpec:
    """What is outside of layers. names: of the parameters, tied ones once."""

    family: Family
    cfg: ModelConfig
    names: tuple[str, ...]
    forms: Mapping[str, ParameterForm]

    def weights(self, tensors: Sequence[Tensor]) -> Weights:
        """The Weights; a tied head is the embedding."""
        forms = [self.forms.get(name) for name in self.names]
        by_name = dict(zip(self.names, _taken(forms, tensors), strict=True))
        tied = [p for p in self.family.spec(self.cfg) if p.tied_to is not None]
        weights: Weights = nest(
            [*by_name, *(p.name for p in tied)], [*by_name.values(), *(by_name[str(p.tied_to)] for p in tied)]
        )
        return weights

    def logits(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """[n, vocab] of rows x [n, width]."""
        batch = ForwardBatch(None, None, slice(None), None)
        return cast(Tensor, self.family.head(self.cfg, self.weights(tensors), x, batch))


def _taken(
    forms: Sequence[ParameterForm | None], tensors: Sequence[Tensor], keeps: bool = False
) -> list[Tensor | OwnWeight]:
    """The weights of parameters whose tensors lie one behind the other. keeps: as `Casts` has it."""
    weights: list[Tensor | OwnWeight] = []
    before: list[Tensor] = []
    at, casts = iter(tensors), Casts(keeps=keeps)
    for form in forms:
        own = [next(at) for _ in range(1 + (len(form.trained) if form else 0))]
        if form is not None and form.shared:
            own[1:1] = before
        elif form is not None and form.rank:
            before = own[1:2]
        weights.append(weight_of(form, own, casts) if form is not None else own[0])
    return weights


def _block(
    spec: _BlockSpec,
    rows: tuple[int, int, int],
    x: Tensor,
    *tensors: Tensor,
    fused: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """A layer of the family on x [tokens, width]; rows: how many, of which length, and the first layer like this one;
    tensors: what `Model.shared` gives, keys and values of another layer, then the layer's parameters; fused: with
    torch's own attention, and no product written over."""
    count, length, layer = rows
    shared: Sequence[Tensor | None] = tensors[:SHARED]
    (positions, cos, sin, bias, places, layer_input), parameters = shared, tensors[SHARED + KEYS :]
    k, v = tensors[SHARED : SHARED + KEYS]
    at = positions if positions is None or cos is None or sin is None else TurnedPositions(positions, cos, sin)
    # Selective checkpointing can keep the result of an attention only if it is one op.
    group, kv_heads = spec.cfg.kv_group(layer), spec.cfg.kv_shape(layer).kv_heads
    cache = Rows(count, length, kv_heads, bias=bias, k=k, v=v, attend=None if fused else attend)
    by_layer = None if layer_input is None else LayerInputs(layer_input, layer_input.shape[1], layer)
    batch = ForwardBatch(*(None, at, slice(None)), cache, StateRows(count, length, places), [cache] * group, by_layer)
    table = spec.of(layer)
    taken = _taken(spec.forms_of(layer), parameters, fused)
    weights = [
        w if isinstance(w, OwnWeight) else family_form(p, w, spec.ranks) for p, w in zip(table, taken, strict=True)
    ]
    w = nest([param.name.removeprefix(f"layers.{layer}.") for param in table], weights)
    # The cache keeps nothing, so layers that are alike may be one; another number would compile each layer by itself.
    out = cast(Tensor, spec.family.block(spec.cfg, w, x, layer, batch))
    after = batch.cache_of(group)
    return (out, after.k, after.v) if layer in spec.sources and isinstance(after, Rows) else out  # type: ignore[return-value]


def _within_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, int64 [rows, length], of documents [rows, length]."""
    at = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - torch.where(begins, at, 0).cummax(1).values


def _head_loss(head: _HeadSpec, targets: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    logits = head.logits(x, weights)
    if torch.compiler.is_compiling():  # the compiler fuses torch's own, and needs one tensor of logits, too
        return nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    return cross_entropy(logits, targets)


def _within_budget(compiled: BlockFunction, *tensors: object) -> Tensor | tuple[Tensor, ...]:
    with functorch_config.patch(activation_memory_budget=BUDGET):  # read by the first call, which compiles
        return compiled(*tensors)


def _checkpointed(
    compute: BlockFunction, context: Contexts | None, rows: tuple[int, int, int], *tensors: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    context_fn = context or noop_context_fn
    block = partial(compute, rows)
    return checkpoint(block, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)


def _node(root: nn.Module, path: str) -> nn.Module:
    for step in filter(None, path.split(".")):  # a parameter of the root itself has no path
        if not hasattr(root, step):
            root.add_module(step, Node())
        root = getattr(root, step)
    return root


@dataclass(frozen=True)
class _Made:
    """How a tensor of the model is made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def _add_parameter(root: nn.Module, name: str, parameter: _Made, device: Device) -> tuple[nn.Module, str]:
    """The module below `root` that now has the parameter, and its name there."""
    stem, _, kind = name.rpartition(".")
    node = _node(root, stem)
    tensor = torch.empty(parameter.shape, device=device, dtype=parameter.dtype)
    node.register_parameter(kind, nn.Parameter(tensor, requires_grad=parameter.trained))
    return node, kind
