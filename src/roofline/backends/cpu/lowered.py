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
FORMAT, SHAPED_FORMAT = 2, 3  # versions of the header below: of models with one attention, and with a table of several
_MOST_SHAPES = 1 << 12
# 8-byte fields: byte order, format, layout, code version, bytes of the file, CRC-32 of all after this field
_HEAD = struct.Struct("<8s6q")
# weights.bin's bytes, its matrices' bytes, tables, positions, vocab; logits; arena; the first attention's layers,
# heads, kv heads, head_dim, rope tables, what the first turns, how, q_scale, eps; first eos id, how many, bos id;
# first number of the code and how many; SHA-256 of the source's weights and of program.txt
_BODY = struct.Struct("<5q 4q 3q 7q2d 3q 2q 32s32s")
# Of SHAPED_FORMAT, behind these: how many attentions and rope tables there are, then each.
_COUNTS, _ATTENTION, _TABLE = struct.Struct("<2q"), struct.Struct("<6q2d"), struct.Struct("<2q")


@dataclass(frozen=True)
class AttentionKind:
    """What layers that attend alike share. group: number of their cache's group; layers, kv_heads, head_dim, value_dim:
    of that group (`program.ir.KvGroup`); q_scale: softmax scale * log2(e), rounded to float32."""

    group: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_scale: float
    eps: float


@dataclass(frozen=True)
class TurnedTable:
    """A rope table. turned: the first dimensions of a head, which it turns."""

    turned: int
    interleaved: bool


@dataclass(frozen=True)
class Lowered:
    """All that the core is told.

    code: int64 records; logits: reference to their value; arena: bytes as (constant, a token, a row); attentions: those
    that records count from 1; tables: of rope; table: place of these in the image, -1: none; positions: theirs, or what
    a model without any serves; matrix_bytes, nbytes: of the image (see layout.py); exchanges: whether ranks share the
    model, which those of a bundle never do.
    """

    code: np.ndarray
    logits: tuple[int, int, int, int]
    arena: tuple[int, int, int]
    attentions: tuple[AttentionKind, ...]
    tables: tuple[TurnedTable, ...]
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
            shapes = {name: [vars(shape) for shape in getattr(self, name)] for name in ("attentions", "tables")}
            return _native.Code(self.code, vars(self) | shapes, self.exchanges)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def groups(self) -> tuple[AttentionKind, ...]:
        """The first attention of each group of the cache."""
        firsts = {kind.group: kind for kind in reversed(self.attentions)}
        return tuple(firsts[group] for group in sorted(firsts))


@dataclass(frozen=True)
class Identity:
    """What else code.bin says: SHA-256 of the source's weights and of the Program's text (hex), and special ids."""

    weights_hash: str
    program_hash: str
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


def to_bytes(lowered: Lowered, identity: Identity, versions: tuple[int, int]) -> bytes:
    """The binary form. versions: of the packed layout and of the code (`_native.versions`)."""
    shaped = len(lowered.attentions) != 1 or len(set(lowered.tables)) > 1 or lowered.attentions[0].value_dim
    shapes = _shapes(lowered) if shaped else b""
    start = _HEAD.size + _BODY.size + len(shapes)
    eos = np.array(identity.eos_ids, "<i8").tobytes()
    body = _BODY.pack(
        *(lowered.nbytes, lowered.matrix_bytes, lowered.table, lowered.positions, lowered.vocab),
        *(*lowered.logits, *lowered.arena, *_first(lowered)),
        *(start, len(identity.eos_ids), -1 if identity.bos_id is None else identity.bos_id),
        *(start + len(eos), len(lowered.code)),
        *(bytes.fromhex(identity.weights_hash), bytes.fromhex(identity.program_hash)),
    )
    code = body + shapes + eos + lowered.code.astype("<i8").tobytes()
    form = SHAPED_FORMAT if shaped else FORMAT
    return _HEAD.pack(MAGIC, BYTE_ORDER, form, *versions, _HEAD.size + len(code), zlib.crc32(code)) + code


def _first(lowered: Lowered) -> tuple[float, ...]:
    """What the header has of the attention and of the rope tables, the first of each."""
    table = lowered.tables[0] if lowered.tables else TurnedTable(0, False)
    sizes, factors = (0, 0, 0, 0), (0.0, 0.0)
    for kind in lowered.attentions[:1]:
        sizes, factors = (kind.layers, kind.heads, kind.kv_heads, kind.head_dim), (kind.q_scale, kind.eps)
    return (*sizes, len(lowered.tables), *astuple(table), *factors)


def _shapes(lowered: Lowered) -> bytes:
    """All attentions and rope tables."""
    kinds = b"".join(_ATTENTION.pack(*astuple(kind)) for kind in lowered.attentions)
    tables = b"".join(_TABLE.pack(*astuple(table)) for table in lowered.tables)
    return _COUNTS.pack(len(lowered.attentions), len(lowered.tables)) + kinds + tables


def _read_shapes(data: bytes) -> tuple[tuple[AttentionKind, ...], tuple[TurnedTable, ...]]:
    """The inverse of `_shapes`. Raises ConfigError."""
    at = _HEAD.size + _BODY.size
    if len(data) < at + _COUNTS.size:
        raise ConfigError("it names a place outside itself")
    counts, at = _COUNTS.unpack_from(data, at), at + _COUNTS.size
    if not all(0 <= count <= _MOST_SHAPES for count in counts):
        raise ConfigError("it has more attentions or rope tables than there can be")
    middle, end = at + counts[0] * _ATTENTION.size, at + counts[0] * _ATTENTION.size + counts[1] * _TABLE.size
    if len(data) < end:
        raise ConfigError("it names a place outside itself")
    kinds = tuple(AttentionKind(*fields) for fields in _ATTENTION.iter_unpack(data[at:middle]))
    return kinds, tuple(TurnedTable(turned, bool(i)) for turned, i in _TABLE.iter_unpack(data[middle:end]))


def from_bytes(data: bytes, versions: tuple[int, int]) -> tuple[Lowered, Identity]:
    """Reads what `to_bytes` wrote. Raises ConfigError: not such a file, of other versions, or damaged."""
    if len(data) < _HEAD.size + _BODY.size or data[:8] != MAGIC:
        raise ConfigError("it is not the code of a bundle")
    _, order, form, layout, code, size, crc = _HEAD.unpack_from(data)
    if order != BYTE_ORDER:
        raise ConfigError("it was written on a machine of the other byte order")
    if form not in (FORMAT, SHAPED_FORMAT):
        raise ConfigError(f"it has format {form}, this build reads formats {FORMAT} and {SHAPED_FORMAT}")
    if (layout, code) != tuple(versions):
        raise ConfigError(
            f"it has layout {layout} and code {code}, this build runs layout {versions[0]}, {versions[1]}"
        )
    if size != len(data):
        raise ConfigError(f"it has {len(data)} bytes instead of {size}")
    if zlib.crc32(data[_HEAD.size :]) != crc:
        raise ConfigError("its checksum is wrong")
    f = _BODY.unpack_from(data, _HEAD.size)
    if form == SHAPED_FORMAT:
        attentions, tables = _read_shapes(data)
    else:
        layers, heads, kv_heads, head_dim, count, turned, interleaved, q_scale, eps = f[12:21]
        sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attentions = (AttentionKind(group=0, value_dim=0, q_scale=q_scale, eps=eps, **sizes),)
        if not 0 <= count <= _MOST_SHAPES:
            raise ConfigError("it has more rope tables than there can be")
        tables = (TurnedTable(turned, bool(interleaved)),) * count
    eos_at, eos_count, bos, code_at, code_count = f[21:26]
    nbytes, matrix_bytes, table, positions, vocab = f[:5]
    code_numbers = _numbers(data, code_at, code_count)
    lowered = Lowered(
        code=code_numbers,
        logits=f[5:9],
        arena=f[9:12],
        attentions=attentions,
        tables=tables,
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
