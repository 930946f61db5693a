"""A lowered Program as plain numbers, and its binary form: a bundle's code.bin (table: docs/reference/bundle.md)."""

import struct
import zlib
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    from roofline import _native

MAGIC = b"RLBUNDLE"
BYTE_ORDER = 0x0102030405060708
FORMAT = 2  # version of the header below
# 8-byte fields: byte order, format, layout, code version, bytes of the file, CRC-32 of all after this field
_HEAD = struct.Struct("<8s6q")
# weights.bin's bytes, its matrices' bytes, tables, positions, vocab; logits; arena; attention; first eos id, how many,
# bos id; first number of the code and how many; SHA-256 of the source's weights and of program.txt
_BODY = struct.Struct("<5q 4q 3q 7q2d 3q 2q 32s32s")


@dataclass(frozen=True)
class Attention:
    """What all layers' attention share. tables: how many rope tables there are; rotated: dimensions of a head that they
    turn; q_scale: softmax scale * log2(e), rounded to float32."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tables: int
    rotated: int
    interleaved: bool
    q_scale: float
    eps: float


@dataclass(frozen=True)
class Lowered:
    """All that the core is told.

    code: int64 records; logits: reference to their value; arena: bytes as (constant, a token, a row); table: place of
    the rope tables in the image, -1: none; positions: theirs, or what a model without any serves; matrix_bytes,
    nbytes: of the image (see layout.py); exchanges: whether ranks share the model, which those of a bundle never do.
    """

    code: np.ndarray
    logits: tuple[int, int, int, int]
    arena: tuple[int, int, int]
    attention: Attention
    vocab: int
    table: int
    positions: int
    matrix_bytes: int
    nbytes: int
    exchanges: bool = False

    @cached_property
    def checked(self) -> "_native.Code":
        """What the core runs: every record checked, as a file may say anything.

        Raises ConfigError with the number of the operation and the field that cannot be.
        """
        from roofline import _native

        try:
            return _native.Code(self.code, vars(self) | vars(self.attention), self.exchanges)
        except ValueError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True)
class Identity:
    """What else code.bin says: SHA-256 of the source's weights and of the Program's text (hex), and special ids."""

    weights_hash: str
    program_hash: str
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


def to_bytes(lowered: Lowered, identity: Identity, versions: tuple[int, int]) -> bytes:
    """The binary form. versions: of the packed layout and of the code (`_native.versions`)."""
    start = _HEAD.size + _BODY.size
    eos = np.array(identity.eos_ids, "<i8").tobytes()
    body = _BODY.pack(
        *(lowered.nbytes, lowered.matrix_bytes, lowered.table, lowered.positions, lowered.vocab),
        *(*lowered.logits, *lowered.arena, *astuple(lowered.attention)),
        *(start, len(identity.eos_ids), -1 if identity.bos_id is None else identity.bos_id),
        *(start + len(eos), len(lowered.code)),
        *(bytes.fromhex(identity.weights_hash), bytes.fromhex(identity.program_hash)),
    )
    code = body + eos + lowered.code.astype("<i8").tobytes()
    return _HEAD.pack(MAGIC, BYTE_ORDER, FORMAT, *versions, _HEAD.size + len(code), zlib.crc32(code)) + code


def from_bytes(data: bytes, versions: tuple[int, int]) -> tuple[Lowered, Identity]:
    """Reads what `to_bytes` wrote. Raises ConfigError: not such a file, of other versions, or damaged."""
    if len(data) < _HEAD.size + _BODY.size or data[:8] != MAGIC:
        raise ConfigError("it is not the code of a bundle")
    _, order, form, layout, code, size, crc = _HEAD.unpack_from(data)
    if order != BYTE_ORDER:
        raise ConfigError("it was written on a machine of the other byte order")
    if form != FORMAT:
        raise ConfigError(f"it has format {form}, this build reads format {FORMAT}")
    if (layout, code) != tuple(versions):
        raise ConfigError(
            f"it has layout {layout} and code {code}, this build runs layout {versions[0]}, {versions[1]}"
        )
    if size != len(data):
        raise ConfigError(f"it has {len(data)} bytes instead of {size}")
    if zlib.crc32(data[_HEAD.size :]) != crc:
        raise ConfigError("its checksum is wrong")
    f = _BODY.unpack_from(data, _HEAD.size)
    layers, heads, kv_heads, head_dim, tables, rotated, interleaved, q_scale, eps = f[12:21]
    attention = Attention(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tables=tables,
        rotated=rotated,
        interleaved=bool(interleaved),
        q_scale=q_scale,
        eps=eps,
    )
    eos_at, eos_count, bos, code_at, code_count = f[21:26]
    nbytes, matrix_bytes, table, positions, vocab = f[:5]
    code_numbers = _numbers(data, code_at, code_count)
    lowered = Lowered(
        code=code_numbers,
        logits=f[5:9],
        arena=f[9:12],
        attention=attention,
        vocab=vocab,
        table=table,
        positions=positions,
        matrix_bytes=matrix_bytes,
        nbytes=nbytes,
    )
    eos = tuple(_numbers(data, eos_at, eos_count).tolist())
    if not all(0 <= i < vocab for i in eos) or not -1 <= bos < vocab:
        raise ConfigError("it has a special id outside the vocabulary")
    return lowered, Identity(f[26].hex(), f[27].hex(), None if bos < 0 else bos, eos)


def _numbers(data: bytes, start: int, count: int) -> np.ndarray:
    """int64: so many numbers of the file from byte `start` on."""
    if start < 0 or start % 8 or not 0 <= count <= (len(data) - start) // 8:
        raise ConfigError("it names a place outside itself")
    return np.frombuffer(data, "<i8", count, start)
