"""A device that is late: what is queued on its streams runs at random moments, in any order that events allow.

Tensors lie on the CPU. A copy with `non_blocking` reads its source when it runs, as a copy from pinned memory does, so
an event that is not recorded, or not waited for, shows as wrong values under some seed.
"""

import random
from contextlib import contextmanager

import torch


class OnDevice(torch.Tensor):
    """A tensor that says it lies on the device."""

    is_cuda = property(lambda self: True)


class Event:
    """torch.cuda.Event: done when what its stream had when it was recorded is done; done before it is recorded."""

    def __init__(self, device):
        self.device, self.mark = device, None

    def record(self):
        self.mark = self.device.put(lambda: None)

    def synchronize(self):
        self.device.run_until(lambda: self.mark is None or self.mark in self.device.done)


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device):
        self.device, self.queue = device, []
        device.streams.append(self)

    def record_event(self):
        event = Event(self.device)
        with self.device.on(self):
            event.record()
        return event

    def wait_event(self, event):
        with self.device.on(self):
            self.device.put(lambda: None, event.mark)


class LateDevice:
    """Patches torch so that its CUDA calls reach this device. Everything that the host does lets some time pass."""

    def __init__(self, monkeypatch, seed):
        self.choose, self.streams, self.done = random.Random(seed), [], set()
        self.recorded = []  # (address, stream): memory that must not be used anew before the stream is done with it
        self.current = Stream(self)
        self.copy_now = torch.Tensor.copy_
        empty, zeros = torch.empty, torch.zeros

        def copy_(target, source, non_blocking=False):
            if not non_blocking:
                return self.copy_now(target, source)
            self.put(lambda: self.copy_now(target, source))
            return target

        def on_the_host(make):
            return lambda *sizes, device=None, pin_memory=False, **options: make(*sizes, **options)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: self._record(*given))
        monkeypatch.setattr(torch, "empty", on_the_host(empty))
        monkeypatch.setattr(torch, "zeros", on_the_host(zeros))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    def _record(self, tensor, stream):
        self.recorded.append((tensor.data_ptr(), stream))

    @contextmanager
    def on(self, stream):
        """torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def put(self, action, after=None):
        """Queue an action on the current stream, behind a mark of any stream; its own mark."""
        mark = object()
        self.current.queue.append((action, after, mark))
        for _ in range(self.choose.choice((0, 0, 1, 3))):
            self._step()
        return mark

    def run_until(self, condition):
        """What a host that waits sees."""
        while not condition():
            assert self._step(), "the device waits for ever"

    def finish(self):
        """Run all that is queued."""
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def _step(self):
        ready = [each for each in self.streams if each.queue and each.queue[0][1] in (None, *self.done)]
        if ready:
            action, _, mark = self.choose.choice(ready).queue.pop(0)
            action()
            self.done.add(mark)
        return bool(ready)
