"""A microbatch on tensors without data: what torch makes, keeps and drops is counted, nothing is computed."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roofline.common.json_types import JsonMapping
from roofline.train.config.schema import TrainConfig
from roofline.train.model import build
from roofline.train.model.modules import Model
from roofline.train.parallel.processes import COMPUTE, World

ACTIVATIONS, LOGITS, PASSING, GRADIENTS = "activations", "logits", "passing", "gradients"


@dataclass
class Rehearsed:
    """Bytes beside parameters and optimizer state.

    parts: at the fullest moment; most: of each part at its own. first: of the stream of activations when the blocks
    begin, whose type is `stream`.
    """

    parts: dict[str, int]
    most: dict[str, int]
    first: int = 0
    stream: torch.dtype = torch.float32


def rehearse(
    config: TrainConfig, shape: JsonMapping, world: World, dtype: torch.dtype, rows: int, several: bool
) -> Rehearsed:
    """One microbatch of `rows` rows, as configured but for compilation.

    Args:
        shape: the canonical configuration. dtype: of the parameters as blocks see them.
        several: the second microbatch of a step, which finds gradients.
    """
    kind, compute = world.device.type, COMPUTE[config.precision]
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model = Model(shape, kind, dtype, world.tensor)
        model.chunk_logits = config.model.loss_fn != "torch_crossentropy"
        build.wrap(model, config.model_copy(update={"compile_config": None}))
        ledger = Ledger()
        for parameter in model.parameters():
            ledger.leave_out(parameter)
            parameter.register_post_accumulate_grad_hook(partial(_keep_gradient, ledger, world.grouped))
        model.compute = partial(_begins, ledger, model.compute)
        model.head_loss = partial(_as_logits, ledger, model.head_loss)
        with ledger:
            for _ in range(1 + several):
                ledger.begin()
                ids = torch.zeros(rows, config.max_seq_len, dtype=torch.int64, device=kind)
                documents = torch.zeros_like(ids) if config.model.attn_config.attn_uses_sequence_id else None
                with torch.autocast(kind, compute) if compute is not None else nullcontext():
                    loss = model(ids, torch.zeros_like(ids), documents)
                ledger.part = PASSING
                loss.backward()  # type: ignore[no-untyped-call]
                del loss, ids, documents
    return ledger.found


class Ledger(TorchDispatchMode):
    """Counts the bytes of the storages that ops return, from then until they are dropped.

    Attributes:
        part: what new ones count as. found: since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[str, int]] = {}
        self._now: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Start a microbatch."""
        self.part = ACTIVATIONS
        self.found = Rehearsed(dict(self._now), dict(self._now))

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor that is there already."""
        self._held[tensor.untyped_storage()._cdata] = ("", 0)

    def move(self, tensor: Tensor, part: str) -> None:
        """Count it as another part."""
        key = tensor.untyped_storage()._cdata
        before, size = self._held[key]
        self._held[key] = (part, size)
        self._add(before, -size)
        self._add(part, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._made(made)
        return out

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        self._held[key] = (self.part, size)
        weakref.finalize(storage, self._dropped, key)
        self._add(self.part, size)
        if sum(self._now.values()) > sum(self.found.parts.values()):
            self.found.parts = dict(self._now)

    def _dropped(self, key: int) -> None:
        part, size = self._held.pop(key)
        self._add(part, -size)

    def _add(self, part: str, size: int) -> None:
        self._now[part] = self._now.get(part, 0) + size
        self.found.most[part] = max(self.found.most.get(part, 0), self._now[part])


def _begins(ledger: Ledger, compute: Callable[..., Tensor], rows: tuple[int, int], x: Tensor, *rest: Any) -> Tensor:
    if not ledger.found.first:
        ledger.found.first, ledger.found.stream = x.untyped_storage().nbytes(), x.dtype
    return compute(rows, x, *rest)


def _as_logits(ledger: Ledger, head_loss: Callable[..., Tensor], *args: Any) -> Tensor:
    ledger.part = LOGITS
    return head_loss(*args)


def _keep_gradient(ledger: Ledger, sharded: bool, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if sharded:
        parameter.grad = None  # it travels, and each rank keeps its share
    else:
        ledger.move(parameter.grad, GRADIENTS)
