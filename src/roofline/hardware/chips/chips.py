"""GPU architectures as data: what a kernel may use of each (chips.toml), and which are not served (refused.toml)."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from roofline.common import log
from roofline.common.errors import UnsupportedError


@dataclass(frozen=True)
class Chip:
    """One architecture, under the name its compiler has for it ("gfx942", "sm_90").

    vendor: "amd" or "nvidia"; lanes: threads that run in lockstep (wavefront, warp); local_bytes: shared memory (LDS)
    one program may take; matrix: what its matrix instructions begin with in assembly, alternatives joined by "|";
    fp8: the flavour of e4m3 its matrix instructions read, "" for none.

    What occupancy.py counts with: registers: of 32 bits that a thread may have, as the compiler counts them
    (.vgpr_count, REG); register_file: how many of them a lane of a SIMD has for all its waves, given out in multiples
    of register_step; waves: that a SIMD holds at most; simds: that share one local memory (a compute unit, on RDNA a
    work group processor, a streaming multiprocessor); local_total: bytes of that memory, of which a program takes
    local_overhead beside its own; programs: that these SIMDs hold at most.

    status: the best evidence there is for kernels on it: "compiled" for it and looked at, "interpreted" (their results
    compared in Triton's interpreter with what they are launched with on it), "run" on it; notes: in words.
    """

    name: str
    vendor: str
    lanes: int
    local_bytes: int
    matrix: str
    fp8: str
    registers: int
    register_file: int
    register_step: int
    waves: int
    simds: int
    programs: int
    local_total: int
    status: str
    notes: str
    local_overhead: int = 0


@cache
def chips() -> dict[str, Chip]:
    """All architectures by name."""
    return {name: Chip(name=name, **row) for name, row in read_table("chips.toml").items()}


def get(name: str) -> Chip:
    """The architecture of that name. Raises UnsupportedError listing the known ones."""
    if name not in chips():
        raise UnsupportedError(f"chip {name!r}", "it is not in the table of chips", tuple(chips()))
    return chips()[name]


@cache  # and so the warning comes once
def resolve(name: str) -> Chip:
    """The row to use for a device of this architecture, as drivers and torch name it ("gfx90a:sramecc+:xnack-").

    An architecture without a row gets that of its nearest lower relative, in its family (gfx9, gfx11, gfx12, NVIDIA),
    else the family's lowest, with a warning: kernels may fail to compile, and are not tuned for it. Raises
    UnsupportedError with the reason for one that Triton does not serve, or of a family that is not known.
    """
    name = architecture(name)
    if name in chips():
        return chips()[name]
    reason = refused(name)
    if reason is not None:
        raise UnsupportedError(f"chip {name!r}", reason, ("the cpu backend",))
    family, number = family_and_number(name)
    rows = ((*family_and_number(row), row) for row in chips())
    relatives = sorted((at, row) for row_family, at, row in rows if row_family == family)
    if not family or not relatives:
        raise UnsupportedError(f"chip {name!r}", "it is of no known family", (*chips(), "the cpu backend"))
    lower = [row for at, row in relatives if at < number]
    relative = lower[-1] if lower else relatives[0][1]
    log.get("hardware").warning(
        "the chip %s is not in hardware/chips/chips.toml: the limits and tiles of %s are used", name, relative
    )
    return chips()[relative]


def refused(name: str) -> str | None:
    """Why no kernel is compiled for this architecture, None where kernels can be."""
    for row in read_table("refused.toml")["refused"]:
        if re.fullmatch(row["names"], architecture(name)):
            return str(row["reason"])
    return None


def architecture(name: str) -> str:
    """The name in the table's spelling: "gfx90a:sramecc+:xnack-" -> "gfx90a", "sm_90a" -> "sm_90", "9.0" -> "sm_90"."""
    name = name.strip().lower().partition(":")[0]
    if match := re.fullmatch(r"(\d+)\.(\d)", name):
        return f"sm_{match[1]}{match[2]}"
    if match := re.fullmatch(r"(sm_\d+)[af]", name):
        return match[1]
    return name


def family_and_number(name: str) -> tuple[str, int]:
    """("gfx9", 0x0a) of "gfx90a", ("sm", 90) of "sm_90"; ("", 0) for a name of neither form."""
    if match := re.fullmatch(r"(gfx\d+?)([0-9a-f]{2})", name):
        return match[1], int(match[2], 16)
    if match := re.fullmatch(r"sm_(\d{2,3})", name):
        return "sm", int(match[1])
    return "", 0


@cache
def read_table(file: str) -> dict[str, Any]:
    """A TOML file of this folder."""
    return tomllib.loads(resources.files("roofline.hardware.chips").joinpath(file).read_text("utf-8"))
