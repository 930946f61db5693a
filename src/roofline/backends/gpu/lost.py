"""Whether a device still computes: after an illegal access, say, every call to it fails until the process ends."""

from collections.abc import Iterator
from contextlib import contextmanager

from roofline.backends.base import LostError
from roofline.common.errors import said


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
            f"{device} computes nothing any more after {said(error)}; the process has to start anew"
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
