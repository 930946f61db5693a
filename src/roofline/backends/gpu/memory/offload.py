"""Layers that live in the host's memory and visit the device one after another, each copied while others compute.

A layer is one block of bytes, so a visit is one copy, from pinned memory on a stream of its own. Two events a buffer
keep the streams apart: `copied`, which the reader waits for, and `read`, which the next copy into it waits for. On the
CPU the same path runs with copies that are done at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Event = Any  # what a kind of Streams marks a place in its queues by
ALIGN = 256  # bytes: where a tensor starts in its block


class Streams(Protocol):
    """The stream that computes and the one that copies, in the order calls are made."""

    def copy(self, target: "Tensor", source: "Tensor") -> Event:
        """Copy on the copying stream; the event of its end."""

    def before_reading(self, copied: Event) -> None:
        """The computing stream waits for the event."""

    def after_reading(self) -> Event:
        """The event of the end of what the computing stream has so far."""

    def before_copying(self, read: Event) -> None:
        """The copying stream waits for the event."""


class Immediate:
    """Everything happens when it is called (CPU)."""

    def copy(self, target: "Tensor", source: "Tensor") -> None:
        target.copy_(source)

    def before_reading(self, copied: None) -> None:
        pass

    def after_reading(self) -> None:
        pass

    def before_copying(self, read: None) -> None:
        pass


class DeviceStreams:
    """A stream of a CUDA or HIP device beside the current one."""

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._device, self._side = device, torch.cuda.Stream(device)

    def copy(self, target: "Tensor", source: "Tensor") -> "torch.cuda.Event":
        import torch

        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        target.record_stream(self._side)
        return self._side.record_event()

    def before_reading(self, copied: "torch.cuda.Event") -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(copied)

    def after_reading(self) -> "torch.cuda.Event":
        import torch

        return torch.cuda.current_stream(self._device).record_event()

    def before_copying(self, read: "torch.cuda.Event") -> None:
        self._side.wait_event(read)


@dataclass
class _Buffer:
    """block: uint8 on the device; read: event that the next copy into it waits for; layer: whose weights it holds or
    gets, None: nobody's; copied: event of their arrival; in_use: between the ends of a `using`."""

    block: "Tensor"
    read: Event
    layer: int | None = None
    copied: Event = None
    in_use: bool = False


class Offload:
    """The weights of a model's layers, some on the device, some on the host.

    Args:
        layers: name -> tensor of each layer, on the CPU; gone through once.
        device: where they are used.
        hosted: the layers that stay on the host.
        buffers: of the largest of these, on the device; with one, copies overlap with resident layers alone.
        streams: what orders copies and reads; None: by the device.

    Raises ConfigError for a layer that there is not, or no buffer.
    """

    def __init__(
        self,
        layers: "Iterable[Mapping[str, Tensor]]",
        device: "torch.device | str",
        hosted: Sequence[int],
        buffers: int = 2,
        streams: Streams | None = None,
    ) -> None:
        import torch

        device = torch.device(device)
        self.hosted = tuple(sorted(set(hosted)))
        on_device = device.type == "cuda"  # HIP's name too
        self._streams = streams or (DeviceStreams(device) if on_device else Immediate())
        self._resident, self._host = {}, {}
        self._like = {}
        for index, layer in enumerate(layers):
            if index in self.hosted:
                self._host[index] = _pack(layer, pin=on_device)
                self._like[index] = {name: tensor.to("meta") for name, tensor in layer.items()}
            else:
                self._resident[index] = {name: tensor.to(device) for name, tensor in layer.items()}
        if buffers < 1 or not self._host.keys() >= set(self.hosted):
            count = len(self._host) + len(self._resident)
            raise ConfigError(f"offload of layers {list(hosted)} of {count} through {buffers} buffers")
        largest = max((block.numel() for block in self._host.values()), default=0)
        self._buffers = [
            _Buffer(torch.empty(largest, dtype=torch.uint8, device=device), self._streams.after_reading())
            for _ in range(min(buffers, len(self.hosted)))
        ]

    @contextmanager
    def using(self, layer: int) -> "Iterator[Mapping[str, Tensor]]":
        """The layer's tensors on the device, to be read by the current stream inside this block only, one at a time.

        The hosted layers that come next, in a circle, are on their way meanwhile.
        """
        if layer in self._resident:
            yield self._resident[layer]
            return
        assert not any(buffer.in_use for buffer in self._buffers), "one layer is used at a time"
        buffer = self._bring(layer, layer)
        for coming in self._after(layer)[: len(self._buffers) - 1]:
            self._bring(coming, layer)
        self._streams.before_reading(buffer.copied)
        buffer.in_use = True
        try:
            yield _unpack(buffer.block, self._like[layer])
        finally:
            buffer.read, buffer.in_use = self._streams.after_reading(), False

    def _after(self, layer: int) -> tuple[int, ...]:
        """The other hosted layers in the order of their next turn."""
        at = self.hosted.index(layer)
        return self.hosted[at + 1 :] + self.hosted[:at]

    def _bring(self, layer: int, now: int) -> _Buffer:
        """The buffer that holds a layer, or gets it: then the one whose own layer is needed last, seen from `now`."""
        for buffer in self._buffers:
            if buffer.layer == layer:
                return buffer
        order = (now, *self._after(now))
        buffer = max(self._buffers, key=lambda b: len(order) if b.layer is None else order.index(b.layer))
        self._streams.before_copying(buffer.read)
        source = self._host[layer]
        buffer.copied = self._streams.copy(buffer.block[: source.numel()], source)
        buffer.layer = layer
        return buffer


def _places(tensors: "Mapping[str, Tensor]") -> Iterator[tuple[str, int, int]]:
    """(name, first byte, bytes) of each tensor in its layer's block."""
    at = 0
    for name, tensor in tensors.items():
        yield name, at, tensor.nbytes
        at += -(-tensor.nbytes // ALIGN) * ALIGN


def _pack(tensors: "Mapping[str, Tensor]", pin: bool) -> "Tensor":
    """uint8 [bytes]: the tensors one after another, in pinned memory where asked."""
    import torch

    places = list(_places(tensors))
    size = max((start + count for _, start, count in places), default=0)
    block = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for name, start, count in places:
        block[start : start + count] = tensors[name].contiguous().view(-1).view(torch.uint8)
    return block


def _unpack(block: "Tensor", like: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Views of a block with the types and shapes of `like`."""
    return {
        name: block[start : start + count].view(like[name].dtype).view(like[name].shape)
        for name, start, count in _places(like)
    }
