"""Copies between host and device that neither side waits for: a GPU does them from and to pinned memory."""

import torch
from torch import Tensor


def to_device(values: Tensor, device: "torch.device | str") -> Tensor:
    """A copy on the device, queued behind what it is doing; `values`, on the host, may be overwritten at once."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    # torch gives this pinned memory to nobody else before the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, complete when the device has done what is queued now: record an event behind it."""
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
