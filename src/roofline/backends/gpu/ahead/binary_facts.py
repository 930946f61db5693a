"""What a compiled kernel shows without being run: registers, spills, memory, matrix instructions."""

import re
import struct
from collections import Counter
from dataclasses import dataclass

from roofline.backends.gpu.ahead.compile import Binary
from roofline.common.errors import ConfigError
from roofline.hardware.chips.chips import Chip


@dataclass(frozen=True)
class Facts:
    """Of one binary.

    registers: of 32 bits that a thread has, accumulation registers included where they are of the same file;
    accumulators: AMD's accumulation registers; scalars: AMD's registers of a whole wave; spills: what does not fit,
    in registers on AMD and in bytes stored and loaded on NVIDIA; scalar_spills: scalars kept in lanes of a vector
    register instead, not in memory; local_bytes: shared memory (LDS) of a program; stack_bytes: memory of each thread;
    code_bytes; warps: of a program; matrix: matrix instruction -> how many; dots: dtype of operands -> how many
    products the kernel has; plain_dots: those of them that the compiler made of ordinary multiplications.
    """

    registers: int
    accumulators: int
    scalars: int
    spills: int
    scalar_spills: int
    local_bytes: int
    stack_bytes: int
    code_bytes: int
    warps: int
    matrix: dict[str, int]
    dots: dict[str, int]
    plain_dots: dict[str, int]


def read(binary: Binary, chip: Chip) -> Facts:
    """All facts of a binary. Raises ConfigError where the compiler's text does not have them in the known form."""
    text = binary.asm["amdgcn" if chip.vendor == "amd" else "ptx"]
    figures = _amd(text) if chip.vendor == "amd" else _nvidia(binary.log, binary.asm["cubin"])
    return Facts(
        **figures,
        local_bytes=binary.local_bytes,
        warps=binary.warps,
        matrix=matrix_instructions(text, chip),
        dots=dots(binary.asm["ttir"]),
        plain_dots=plain_dots(binary.asm["ttgir"]),
    )


def matrix_instructions(text: str, chip: Chip) -> dict[str, int]:
    """Instruction -> how often it stands in the assembly."""
    names = "|".join(re.escape(start) for start in chip.matrix.split("|"))
    waits = r"wgmma\.(?:fence|commit_group|wait_group)"  # what stands around Hopper's, and computes nothing
    instructions = re.findall(rf"^\s*(?:@!?%p\d+ )?(?!{waits})((?:{names})[\w.:]*)", text, re.MULTILINE)
    return dict(sorted(Counter(instructions).items()))


def dots(ttir: str) -> dict[str, int]:
    """dtype of the first operand, as MLIR names it ("bf16", "f32", "f8E4M3FN") -> products in the kernel."""
    operands = re.findall(r"= tt\.dot(?:_scaled)? .* : tensor<[\dx]*x(\w+)[,>]", ttir)
    return dict(sorted(Counter(operands).items()))


def plain_dots(ttgir: str) -> dict[str, int]:
    """Those products whose result lies in a layout of no matrix instruction ("#blocked")."""
    operands = re.findall(r"= tt\.dot .* : tensor<[\dx]*x(\w+)[,>].* -> tensor<[^>]*#blocked\d*>", ttgir)
    return dict(sorted(Counter(operands).items()))


def _amd(text: str) -> dict[str, int]:
    """Read the facts from the metadata at the end of the assembly and the comments LLVM writes after the code."""
    vectors, accumulators = _number(text, r"\.vgpr_count:\s+(\d+)"), _number(text, r"\.agpr_count:\s+(\d+)", 0)
    return {
        # gfx908 has two files of one size each: the larger number decides. Later ones count both together here.
        "registers": max(vectors, accumulators),
        "accumulators": accumulators,
        "scalars": _number(text, r"\.sgpr_count:\s+(\d+)"),
        "spills": _number(text, r"\.vgpr_spill_count:\s+(\d+)"),
        "scalar_spills": _number(text, r"\.sgpr_spill_count:\s+(\d+)"),
        "stack_bytes": _number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        "code_bytes": _number(text, r"codeLenInByte = (\d+)"),
    }


def _nvidia(log: str, cubin: bytes) -> dict[str, int]:
    """From what `ptxas -v` says and the sections of its output."""
    stored, loaded = (_number(log, rf"(\d+) bytes spill {word}") for word in ("stores", "loads"))
    return {
        "registers": _number(log, r"Used (\d+) registers"),
        "accumulators": 0,
        "scalars": 0,
        "spills": stored + loaded,
        "scalar_spills": 0,
        "stack_bytes": _number(log, r"(\d+) bytes stack frame"),
        "code_bytes": text_bytes(cubin),
    }


def _number(text: str, pattern: str, default: int | None = None) -> int:
    match = re.search(pattern, text)
    if match is None and default is None:
        raise ConfigError(f"the compiler's text lacks {pattern!r}: this version of Triton is not one that we know")
    return int(match[1]) if match else int(default or 0)


def text_bytes(elf: bytes) -> int:
    """Bytes of code in a 64-bit ELF file: its sections named .text*. Raises ConfigError for anything else."""
    if elf[:5] != b"\x7fELF\x02":
        raise ConfigError("a compiled kernel is no 64-bit ELF file: this version of Triton is not one that we know")
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", elf, start + place * size) for place in range(count)]
    strings = sections[names][4]  # where in the file the section names lie
    return sum(section[5] for section in sections if elf.startswith(b".text", strings + section[0]))
