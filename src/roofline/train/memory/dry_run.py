"""Runs a microbatch on tensors without data, and counts the memory that torch would allocate and keep."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roofline.common.json_types import JsonMapping
from roofline.train.config.schema import TrainConfig
from roofline.train.model import build
from roofline.train.model.form import ParameterForm
from roofline.train.model.modules import BlockFunction, Model
from roofline.train.parallel.processes import COMPUTE, World

ACTIVATIONS, LOGITS, PASSING, GRADIENTS = "activations", "logits", "passing", "gradients"


@dataclass
class DryRunUsage:
    """Bytes in use, without parameters and optimizer state.

    parts: at the fullest moment; most: the maximum of each part by itself. first, stream: bytes and type of the
    activations that enter the first block.
    """

    parts: dict[str, int]
    most: dict[str, int]
    first: int = 0
    stream: torch.dtype = torch.float32


def dry_run(
    config: TrainConfig,
    shape: JsonMapping,
    world: World,
    dtype: torch.dtype,
    rows: int,
    several: bool | None = None,
    forms: Mapping[str, ParameterForm] = MappingProxyType({}),
) -> DryRunUsage:
    """The memory of one microbatch of `rows` rows, without compilation.

    Args:
        shape: the canonical configuration. dtype: of the parameters as blocks use them.
        several: count the second microbatch of a step, which finds the gradients of the first; None: a forward pass
            of an evaluation.
        forms: of frozen parameters, by name.
    """
    kind, compute = world.device.type, COMPUTE[config.precision]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model = Model(shape, kind, dtype, world.tensor, forms)
        model.chunk_logits = config.model.loss_fn != "torch_crossentropy"
        build.wrap(model, config.model_copy(update={"compile_config": None}))
        ledger = Ledger()
        for parameter in model.parameters():
            ledger.leave_out(parameter)
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(partial(_count_gradient, ledger, world.grouped))
        model.compute = partial(_watch_first_block, ledger, model.compute)
        model.head_loss = partial(_count_as_logits, ledger, model.head_loss)
        with ledger, torch.set_grad_enabled(several is not None):
            for _ in range(1 + bool(several)):
                ledger.begin()
                ids = torch.zeros(rows, config.max_seq_len, dtype=torch.int64, device=kind)
                documents = torch.zeros_like(ids) if config.model.attn_config.attn_uses_sequence_id else None
                with torch.autocast(kind, compute) if compute is not None else nullcontext():
                    loss = model(ids, torch.zeros_like(ids), documents)
                ledger.part = PASSING
                if several is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
                del loss, ids, documents
    return ledger.usage


class Ledger(TorchDispatchMode):
    """Counts the bytes of the storages that ops return, until they are freed.

    Attributes:
        part: what new storages count as. usage, chunks: since `begin`; chunks: of logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[str, int]] = {}  # (part, bytes)
        self._now: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Start to count a microbatch."""
        self.part, self.chunks = ACTIVATIONS, 0
        self.usage = DryRunUsage(dict(self._now), dict(self._now))

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor that exists already."""
        self._storages[tensor.untyped_storage()._cdata] = ("", 0)

    def move(self, tensor: Tensor, part: str) -> None:
        """Count a tensor as another part from now on."""
        key = tensor.untyped_storage()._cdata
        before, size = self._storages[key]
        self._storages[key] = (part, size)
        self._add(before, -size)
        self._add(part, size)

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: Callable[..., object],
        _: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = (self.part, size)
        weakref.finalize(storage, self._freed, key)
        self._add(self.part, size)
        if sum(self._now.values()) > sum(self.usage.parts.values()):
            self.usage.parts = dict(self._now)

    def _freed(self, key: int) -> None:
        part, size = self._storages.pop(key)
        self._add(part, -size)

    def _add(self, part: str, size: int) -> None:
        self._now[part] = self._now.get(part, 0) + size
        self.usage.most[part] = max(self.usage.most.get(part, 0), self._now[part])


def _watch_first_block(
    ledger: Ledger, compute: BlockFunction, rows: tuple[int, int, int], x: Tensor, *rest: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    if not ledger.usage.first:
        ledger.usage.first, ledger.usage.stream = x.untyped_storage().nbytes(), x.dtype
    return compute(rows, x, *rest)


def _count_as_logits(
    ledger: Ledger, head_loss: Callable[..., Tensor], targets: Tensor, x: Tensor, *weights: Tensor
) -> Tensor:
    ledger.part = LOGITS
    ledger.chunks += 1
    if ledger.chunks > 1:
        return x.float().sum()  # each chunk takes as many bytes as the first, which are freed, and many ops
    return head_loss(targets, x, *weights)


def _count_gradient(ledger: Ledger, sharded: bool, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if sharded:
        parameter.grad = None  # it is sent, and each rank keeps its shard
    else:
        ledger.move(parameter.grad, GRADIENTS)
