"""What a device's errors mean: one that is gone (after an illegal access every call to it fails until the process
ends), and one whose memory is not there after all."""

from collections.abc import Iterator
from contextlib import contextmanager

from roofline.backends.base import LostError
from roofline.backends.gpu.devices import UsableDevice
from roofline.common.errors import CapacityError, describe_error
from roofline.common.units import human_bytes


@contextmanager
def told_if_lost(device: str) -> Iterator[None]:
    """An error inside is a LostError where the device answers nothing any more; else it stays what it is."""
    try:
        yield
    except LostError:
        raise
    except Exception as error:
        if answers(device):
            raise
        raise LostError(
            f"{device} computes nothing any more after {describe_error(error)}; the process has to start anew"
        ) from error


def answers(device: str) -> bool:
    """Whether the device finishes what it was given."""
    import torch

    if torch.device(device).type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever a driver or torch says then
        return False
    return True


@contextmanager
def what_is_lacking(device: UsableDevice, planned: int) -> Iterator[None]:
    """Memory that another process took since the model was planned is a CapacityError, in our words."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        free = int(torch.cuda.mem_get_info(device.torch_name)[0])
        remedy = f"{human_bytes(device.free)} were free when it was planned. Try again, or with a smaller cache_tokens."
        raise CapacityError(f"{device.device.title}: the model as planned", planned, free, "bytes", remedy) from error
