"""What is known of a loaded adapter, on both sides of the process border."""

import msgspec

from roofline.common.errors import RequestError


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """A loaded adapter. digest: SHA-256 (hex) of what it computes, which names it to an engine; nbytes: in memory."""

    digest: str
    path: str
    rank: int
    matrices: int
    nbytes: int


def adapted_fingerprint(base: str, digest: str | None) -> str:
    """What answers with an adapter of that digest were computed from. base: the model's fingerprint without adapters;
    digest: None without one."""
    return base if digest is None else f"{base}.{digest[:16]}"


def unknown_adapter() -> RequestError:
    """A request for an adapter that is not there, or not any more."""
    return RequestError(404, "model_not_found", "The adapter has been unloaded.", param="model")
