"""GPU architectures as data: what a kernel may use of each. The table is chips.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from roofline.common.errors import UnsupportedError


@dataclass(frozen=True)
class Chip:
    """One architecture, under the name its compiler has for it ("gfx942", "sm_90").

    vendor: "amd" or "nvidia"; lanes: threads that run in lockstep (wavefront, warp); local_bytes: shared memory (LDS)
    one program may take; matrix: what its matrix instructions begin with in assembly, alternatives joined by "|";
    fp8: the flavour of e4m3 its matrix instructions read, "" for none.
    """

    name: str
    vendor: str
    lanes: int
    local_bytes: int
    matrix: str
    fp8: str


@cache
def chips() -> dict[str, Chip]:
    """All architectures by name."""
    text = resources.files("roofline.hardware").joinpath("chips.toml").read_text("utf-8")
    return {name: Chip(name=name, **row) for name, row in tomllib.loads(text).items()}


def get(name: str) -> Chip:
    """The architecture of that name. Raises UnsupportedError listing the known ones."""
    if name not in chips():
        raise UnsupportedError(f"chip {name!r}", "it is not in the table of chips", tuple(chips()))
    return chips()[name]
