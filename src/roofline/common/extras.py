"""Packages that only some of this program needs: what is said where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from roofline.common.errors import UnsupportedError

# Top module -> (the name to install it by, the extra of ours that brings it; "": every install does).
_PACKAGES = {
    "torch": ("torch", "gpu"),
    "triton": ("triton", "gpu"),
    "safetensors": ("safetensors", "train"),
    "yaml": ("pyyaml", "train"),
    "backports": ("backports.zstd", "train"),
    "xxhash": ("xxhash", "train"),
    "pyarrow": ("pyarrow", "train"),
    "opentelemetry": ("opentelemetry-sdk and its exporter", "otlp"),
    "obstore": ("obstore", "train"),
    "cryptography": ("cryptography", "receipts"),
    "llguidance": ("llguidance", ""),
}


def missing_package(error: ImportError) -> UnsupportedError | None:
    """The error with the command that mends it, where `error` is the import of one of these packages, which is not
    installed. None otherwise: that is a bug, or a broken package."""
    top = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or top not in _PACKAGES:
        return None
    name, extra = _PACKAGES[top]
    trace = error.__traceback__
    while trace is not None:  # training needs more than torch, so its own extra is named
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith(("roofline.train.", "roofline.bench.train")):
            extra = "train"
        trace = trace.tb_next
    brings = f"'roofline[{extra}]'" if extra else name
    return UnsupportedError(f"running this without {name}", f"pip install {brings} brings it")


@contextmanager
def named_packages() -> Iterator[None]:
    """Around what may import such packages, also as a decorator: raises UnsupportedError where one is missing."""
    try:
        yield
    except ImportError as error:
        readable = missing_package(error)
        if readable is None:
            raise
        raise readable from error
