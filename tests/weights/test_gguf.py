"""The GGUF reader: right on good files, ConfigError with file and field on every bad one."""

import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_builders import ARRAY, BOOL, F32, I32, STRING, U32, U64, GGUFBuilder, text, tiny_llama

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.files import gguf
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.gguf_strings import find_strings

Write = Callable[..., Path]


def test_values_of_every_kind_come_back(write: Write) -> None:
    builder = GGUFBuilder()
    builder.pairs = [
        ("a.u32", U32, 7),
        ("a.u64", U64, 2**40),
        ("a.f32", F32, 0.5),
        ("a.bool", BOOL, 1),
        ("a.text", STRING, "grüße"),
        ("a.numbers", ARRAY, (I32, [3, -1])),
        ("a.flags", ARRAY, (BOOL, [0, 1])),
        ("a.none", ARRAY, (STRING, [])),
        ("a.nested", ARRAY, (ARRAY, [(I32, [1]), (STRING, ["x", ""])])),
    ]
    builder.add("w", np.arange(64, dtype=np.float32).reshape(2, 32), "F16")
    file = GGUFFile(write(builder))
    assert dict(file.metadata) == {
        **{"a.u32": 7, "a.u64": 2**40, "a.f32": 0.5, "a.bool": True, "a.text": "grüße", "a.numbers": [3, -1]},
        **{"a.flags": [False, True], "a.none": [], "a.nested": [[1], ["x", ""]]},
    }
    assert file.metadata["a.bool"] is True
    assert (file.tensors["w"].shape, file.tensors["w"].format, file.tensors["w"].nbytes) == ((2, 32), "F16", 128)
    back = formats.get("F16").dequantize(file.read("w"), (2, 32))
    assert np.array_equal(back.reshape(-1), np.arange(64))
    with pytest.raises(ConfigError, match="no tensor 'v'"):
        file.read("v")


def test_version_2_and_other_alignments_are_read(write: Write) -> None:
    builder = tiny_llama()
    builder.version = 2
    assert GGUFFile(write(builder)).version == 2
    builder = GGUFBuilder()
    builder.alignment = 64
    builder.pairs = [("general.alignment", U32, 64)]
    for name in "ab":
        builder.add(name, np.full(3, ord(name), np.float32))
    file = GGUFFile(write(builder))
    assert file.read("b").view("<f4").tolist() == [98, 98, 98]


@pytest.mark.slow
def test_real_file_equals_the_gguf_package(smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    ours, theirs = GGUFFile(smollm2_path), gguf.GGUFReader(str(smollm2_path))
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert info.format == tensor.tensor_type.name
        assert np.array_equal(ours.read(tensor.name), tensor.data.view(np.uint8).reshape(-1))


def test_real_header_opens_quickly(smollm2_path: Path) -> None:
    GGUFFile(smollm2_path)  # page cache and imports
    begin = time.perf_counter()
    GGUFFile(smollm2_path)
    assert time.perf_counter() - begin < 0.2  # 5 ms on an idle machine; strings walked one by one took 30


# --- hostile files -----------------------------------------------------------------------------------------------


def _set(**fields: Any) -> Callable[[GGUFBuilder], bytes]:
    def spoil(builder: GGUFBuilder) -> bytes:
        for name, content in fields.items():
            setattr(builder, name, content)
        return builder.build()

    return spoil


def _pair(key: str, kind: int, content: Any) -> Callable[[GGUFBuilder], bytes]:
    def spoil(builder: GGUFBuilder) -> bytes:
        builder.pairs.append((key, kind, content))
        return builder.build()

    return spoil


def _tensor(field: int, content: Any, index: int = 3) -> Callable[[GGUFBuilder], bytes]:
    """Change a tensor's entry in the header only; its bytes stay where they are."""

    def spoil(builder: GGUFBuilder) -> bytes:
        data = builder.build()
        before = len(builder.header())
        data = data[-(-before // 32) * 32 :]
        builder.tensors[index][field] = content
        header = builder.header()
        return header.ljust(-(-len(header) // 32) * 32, b"\0") + data

    return spoil


def _raw_value(raw: bytes) -> Callable[[GGUFBuilder], bytes]:
    """A last key "x" whose type and value are these bytes."""

    def spoil(builder: GGUFBuilder) -> bytes:
        builder.tensors = []
        builder.pair_count = len(builder.pairs) + 1
        return builder.header() + text("x") + raw

    return spoil


def _overlap(builder: GGUFBuilder) -> bytes:
    return _tensor(3, builder.tensors[2][3])(builder)


def _nested(depth: int) -> bytes:
    """Array type tag, then `depth` arrays of one array each."""
    return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


HOSTILE: dict[str, tuple[Callable[[GGUFBuilder], bytes], str]] = {
    "empty": (lambda b: b"", "empty"),
    "one byte": (lambda b: b"G", "magic"),
    "magic": (lambda b: b"GGML" + b.build()[4:], "magic"),
    "version 1": (_set(version=1), "version"),
    "version of a big-endian file": (_set(version=3 << 24), "big-endian"),
    "head cut": (lambda b: b.build()[:20], "metadata_kv_count"),
    "2^32 tensors": (_set(tensor_count=2**32), "tensor_count"),
    "2^64-1 tensors": (_set(tensor_count=2**64 - 1), "tensor_count"),
    "2^32 pairs": (_set(pair_count=2**32), "metadata_kv_count"),
    "2^64-1 pairs": (_set(pair_count=2**64 - 1), "metadata_kv_count"),
    "one pair too many": (_set(pair_count=12), "tensor name 0"),
    "one tensor too many": (_set(tensor_count=21), "tensor"),
    "same key twice": (_pair("llama.block_count", U32, 2), "llama.block_count.*twice"),
    "empty key": (_pair("", U32, 2), "is empty"),
    "key not UTF-8": (_pair(b"\xff\xfe", U32, 2), "UTF-8"),  # type: ignore[arg-type]
    "key of 64 KiB": (_pair("k" * 65536, U32, 2), "metadata key 11.*65536"),
    "string not UTF-8": (_pair("s", STRING, b"\xc3"), "'s'.*UTF-8"),
    "value type 13": (_raw_value(struct.pack("<I", 13)), "'x'.*type 13"),
    "boolean 2": (_pair("b", BOOL, 2), "'b'.*not a boolean"),
    "boolean 2 in an array": (_pair("b", ARRAY, (BOOL, [0, 2])), "'b'.*not a boolean"),
    "string of 2^63 bytes": (_raw_value(struct.pack("<IQ", STRING, 2**63)), "'x'.*9223372036854775808"),
    "string past the end": (_raw_value(struct.pack("<IQ", STRING, 1000) + b"short"), "'x'.*truncated"),
    "array of 2^32": (_raw_value(struct.pack("<IIQ", ARRAY, U32, 2**32)), "'x'.*4294967296 elements"),
    "array of 2^61 (bytes overflow 64 bits)": (_raw_value(struct.pack("<IIQ", ARRAY, U64, 2**61)), "'x'.*elements"),
    "array of 2^32 strings": (_raw_value(struct.pack("<IIQ", ARRAY, STRING, 2**32)), "'x'.*elements"),
    "array of unknown type": (_raw_value(struct.pack("<IIQ", ARRAY, 77, 1)), "'x'.*type 77"),
    "array cut": (_raw_value(struct.pack("<II", ARRAY, U32)), "'x'.*truncated"),
    "array string past the end": (
        _raw_value(struct.pack("<IIQQ", ARRAY, STRING, 2, 3) + b"abc" + struct.pack("<Q", 2**64 - 1) + b"x" * 40),
        "'x'.*past the end",
    ),
    "arrays 1000 deep": (_raw_value(_nested(1000)), "'x'.*nested deeper"),
    "alignment 0": (_pair("general.alignment", U32, 0), "general.alignment"),
    "alignment 3": (_pair("general.alignment", U32, 3), "general.alignment"),
    "alignment 48": (_pair("general.alignment", U32, 48), "general.alignment"),
    "alignment 2^31": (_pair("general.alignment", U32, 2**31), "general.alignment"),
    "alignment negative": (_pair("general.alignment", I32, -32), "general.alignment"),
    "alignment a string": (_pair("general.alignment", STRING, "32"), "general.alignment"),
    "alignment true": (_pair("general.alignment", BOOL, 1), "general.alignment"),
    "tensor twice": (_tensor(0, "token_embd.weight"), "token_embd.weight.*twice"),
    "tensor without name": (_tensor(0, ""), "tensor name 3.*empty"),
    "no dimensions": (_tensor(1, ()), "attn_q.*dimensions"),
    "five dimensions": (_tensor(1, (1, 1, 1, 1, 32)), "attn_q.*dimensions"),
    "dimension 0": (_tensor(1, (0, 64)), "attn_q.*is 0"),
    "dimensions whose product is 2^64": (_tensor(1, (2**32, 2**32)), "attn_q.*takes"),
    "dimensions whose product is 0 in 64 bits": (_tensor(1, (2**62, 2**62, 2**62, 32)), "attn_q.*takes"),
    "dimension 2^63": (_tensor(1, (1, 2**63)), "attn_q.*takes"),
    "rows of half a block": (_tensor(1, (64, 48)), "attn_q.*blocks of 32"),
    "unknown tensor type": (_tensor(2, 4), "attn_q.*type 4"),
    "tensor type 2^32-1": (_tensor(2, 2**32 - 1), "attn_q.*unknown"),
    "offset past the end": (_tensor(3, 1 << 40), "attn_q.*truncated"),
    "offset 2^64-32 (end overflows 64 bits)": (_tensor(3, 2**64 - 32), "attn_q.*truncated"),
    "offset misaligned": (_tensor(3, 4001), "attn_q.*multiple of the alignment"),
    "overlap": (_overlap, "overlaps"),
    "data cut by a byte": (lambda b: b.build()[:-1], "output_norm.weight.*truncated"),
    "data missing": (lambda b: b.header(), "the file has"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_class_j_hostile_file_is_refused_by_file_and_field(case: str, write: Write) -> None:
    spoil, field = HOSTILE[case]
    path = write(spoil(tiny_llama()))
    with pytest.raises(ConfigError, match=field) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)


def _refusal(path: Path) -> str:
    """What the reader says of a file; nothing where it opens."""
    try:
        GGUFFile(path)
    except ConfigError as error:
        return str(error)
    return ""


U8 = 0


def _alone(spoil: Callable[[GGUFBuilder], bytes]) -> bytes:
    """A file with nothing in it but what `spoil` adds."""
    return spoil(GGUFBuilder())


def _value(raw: bytes) -> bytes:
    """A file with the one key "x", whose type and value are these bytes."""
    return _alone(_raw_value(raw))


def _shortest_pair(key: str) -> bytes:
    return text(key) + struct.pack("<IB", BOOL, 1)


# Of each limit: a file just within it, what is said of that one ("": it opens), one just beyond, what is said of it.
LIMITS: dict[str, tuple[bytes, str, bytes, str]] = {
    "version": (_alone(_set(version=2)), "", _alone(_set(version=4)), "version: 4 is not 2 or 3"),
    "key": (
        _alone(_pair("k" * 65_535, U32, 2)),
        "",
        _alone(_pair("k" * 65_536, U32, 2)),
        "longer than the 65535",
    ),
    "string": (
        _value(struct.pack("<IQ", STRING, 1 << 26)),
        "needs 67108864 bytes, 0 are left",
        _value(struct.pack("<IQ", STRING, (1 << 26) + 1)),
        "longer than the 67108864",
    ),
    "depth": (_value(_nested(3)), "", _value(_nested(4)), "nested deeper than 4"),
    "elements": (
        _value(struct.pack("<IIQ", ARRAY, U8, 1 << 24) + bytes(1 << 24)),
        "",
        _value(struct.pack("<IIQ", ARRAY, U8, (1 << 24) + 1) + bytes((1 << 24) + 1)),
        "more than the 16777216 allowed in a file",
    ),
    "least alignment": (
        _alone(_pair("general.alignment", U32, 8)),
        "",
        _alone(_pair("general.alignment", U32, 4)),
        "4 is not a power of two from 8",
    ),
    "most alignment": (
        _alone(_pair("general.alignment", U32, 1 << 20)),
        "",
        _alone(_pair("general.alignment", U32, 1 << 21)),
        "2097152 is not a power of two from 8 to 1048576",
    ),
    "empty strings at the end": (
        _value(struct.pack("<IIQ", ARRAY, STRING, 2) + bytes(16)),
        "",
        _value(struct.pack("<IIQ", ARRAY, STRING, 3) + bytes(23)),
        "3 elements cannot fit in the 23 bytes left",
    ),
    "empty arrays at the end": (
        _value(struct.pack("<IIQ", ARRAY, ARRAY, 2) + bytes(24)),
        "",
        _value(struct.pack("<IIQ", ARRAY, ARRAY, 3) + bytes(35)),
        "3 elements cannot fit in the 35 bytes left",
    ),
    "numbers at the end": (
        _value(struct.pack("<IIQ", ARRAY, U64, 2) + bytes(16)),
        "",
        _value(struct.pack("<IIQ", ARRAY, U64, 3) + bytes(23)),
        "3 elements cannot fit in the 23 bytes left",
    ),
    "string at the end": (
        _value(struct.pack("<IQ", STRING, 5) + b"whole"),
        "",
        _value(struct.pack("<IQ", STRING, 6) + b"whole"),
        "'x': needs 6 bytes, 5 are left",
    ),
    # The shortest pair has 14 bytes: a key of one letter and a byte; the shortest row of the tensors' table has 33.
    "pairs": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(map(_shortest_pair, "ab")),
        "",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + bytes(41),
        "3 entries cannot fit in a file of 65 bytes",
    ),
    "tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + bytes(66),
        "tensor name 0: is empty",
        b"GGUF" + struct.pack("<IQQ", 3, 3, 0) + bytes(98),
        "3 tensors cannot fit in a file of 122 bytes",
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_are_where_they_are_said_to_be(limit: str, write: Write) -> None:
    within, said, beyond, said_beyond = LIMITS[limit]
    refusal = _refusal(write(within))
    assert said in refusal
    assert bool(said) == bool(refusal)
    assert said_beyond in _refusal(write(beyond))


def test_elements_are_counted_over_all_arrays_of_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MAX_ELEMENTS", 110)  # the tiny model has 100 in two arrays
    assert _refusal(write(_pair("x", ARRAY, (I32, [1] * 10))(tiny_llama()))) == ""
    assert "11 elements are more than the 110" in _refusal(write(_pair("x", ARRAY, (I32, [1] * 11))(tiny_llama())))


def test_tensors_have_up_to_four_dimensions(write: Write) -> None:
    builder = GGUFBuilder()
    values = np.arange(8, dtype=np.float32)
    for shape in ((8,), (2, 4), (2, 2, 2), (2, 1, 2, 2)):
        builder.add(f"t{len(shape)}", values.reshape(shape))
    file = GGUFFile(write(builder))
    assert [info.shape for info in file.tensors.values()] == [(8,), (2, 4), (2, 2, 2), (2, 1, 2, 2)]
    assert all(file.read(name).view("<f4").tolist() == values.tolist() for name in file.tensors)


def test_values_have_the_type_that_their_number_says(write: Write) -> None:
    scalars = {
        0: ("<B", 200),
        1: ("<b", -3),
        2: ("<H", 60_000),
        3: ("<h", -300),
        4: ("<I", 1 << 31),
        5: ("<i", -(1 << 20)),
    }
    scalars |= {6: ("<f", 0.5), 10: ("<Q", 1 << 63), 11: ("<q", -(1 << 40)), 12: ("<d", 0.1)}
    for kind, (layout, value) in scalars.items():
        raw = struct.pack(layout, value)
        assert GGUFFile(write(_value(struct.pack("<I", kind) + raw))).metadata["x"] == value
        twice = _value(struct.pack("<IIQ", ARRAY, kind, 2) + raw + raw)
        assert GGUFFile(write(twice)).metadata["x"] == [value, value]


def test_foreign_tensor_types_are_unsupported_by_name(write: Write) -> None:
    """Every type that the format's own package knows is read, or refused by its name."""
    types = pytest.importorskip("gguf.constants", reason="it lists the types").GGMLQuantizationType
    read = {form.gguf_type for form in formats.FORMATS.values()}
    for kind in types:
        if kind.value in read:
            continue
        with pytest.raises(UnsupportedError, match=rf"attn_q.*type {kind.name} is not supported.*Q4_K"):
            GGUFFile(write(_tensor(2, kind.value)(tiny_llama())))


def test_string_array_that_is_not_utf8_is_refused_when_it_is_read(write: Write) -> None:
    builder = GGUFBuilder()
    builder.pairs = [("t", ARRAY, (STRING, ["ok", b"\xff"])), ("n", ARRAY, (ARRAY, []))]
    file = GGUFFile(write(builder))
    assert file.metadata["n"] == []
    assert "t" in file.metadata
    with pytest.raises(ConfigError, match=r"t: a string of the array is not UTF-8"):
        file.metadata["t"]


@pytest.mark.parametrize("missing", ["nothing.gguf", "."])
def test_missing_file_is_refused(missing: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        GGUFFile(tmp_path / missing)


def test_every_truncation_of_a_good_file_is_refused(write: Write) -> None:
    whole = tiny_llama().build()
    for length in [*range(0, len(tiny_llama().header()), 7), len(whole) - 1]:
        with pytest.raises(ConfigError):
            GGUFFile(write(whole[:length]))


GOOD = tiny_llama().build()
HEADER = len(tiny_llama().header())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, HEADER - 8),
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\0\0\0\x80"])),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_class_j_mutated_headers_never_crash(edits: list[tuple[int, bytes]], write: Write) -> None:
    content = bytearray(GOOD)
    for position, raw in edits:
        content[position : position + len(raw)] = raw
    _survives(write(bytes(content)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.binary(max_size=200))
def test_random_bytes_after_a_head_never_crash(head: bytes, write: Write) -> None:
    _survives(write(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + head))


def test_mutated_real_header_never_crashes(smollm2_path: Path, write: Write) -> None:
    real = bytearray(smollm2_path.open("rb").read(1_785_664))  # up to the first tensor
    rng = np.random.default_rng(5)
    # The head's small fields and the tensor table are where a flipped bit means something; vocabularies are long.
    places = np.concatenate([rng.integers(0, 1500, 20), rng.integers(1_765_000, len(real), 20)])
    for place in places:
        spoiled = bytearray(real)
        spoiled[place] ^= 1 << int(rng.integers(8))
        _survives(write(bytes(spoiled)))


def _survives(path: Path) -> None:
    """Opening, and decoding everything, works or is refused in the family's errors; nothing else escapes."""
    try:
        dict(GGUFFile(path).metadata)
        open_checkpoint(path)
    except (ConfigError, UnsupportedError):
        pass


# --- the fast walk over strings ----------------------------------------------------------------------------------

AWKWARD = st.one_of(
    st.binary(max_size=6),
    st.sampled_from([b"", b"\0" * 9, b"\x05" + b"\0" * 7, b"a" * 255, b"b" * 256, b"c" * 70_000, b"\0" * 300]),
)


@settings(max_examples=200, deadline=None)
@given(strings=st.lists(AWKWARD, max_size=120), before=st.binary(max_size=9), after=st.binary(max_size=20))
def test_fast_walk_finds_what_plain_steps_find(strings: list[bytes], before: bytes, after: bytes) -> None:
    raw = before + b"".join(map(text, strings)) + after
    found = find_strings(np.frombuffer(raw, np.uint8), len(before), len(strings))
    assert found is not None
    assert found.end == len(raw) - len(after)
    assert len(found) == len(strings)
    try:
        expected = [s.decode() for s in strings]
    except UnicodeDecodeError:
        with pytest.raises(UnicodeDecodeError):
            found.decode()
    else:
        assert found.decode() == expected


def test_fast_walk_refuses_strings_past_the_end() -> None:
    raw = b"".join(text(str(i)) for i in range(1000))
    data = np.frombuffer(raw, np.uint8)
    assert find_strings(data, 0, 1001) is None
    assert find_strings(data[:-1], 0, 1000) is None
    assert find_strings(data, 0, 1000) is not None


def test_strings_made_to_break_the_chain_stay_linear() -> None:
    # Every string holds eight zero bytes, which look like lengths: windows yield one string each.
    raw = b"".join(text(b"ab" + b"\0" * 9) for _ in range(200_000))
    begin = time.perf_counter()
    found = find_strings(np.frombuffer(raw, np.uint8), 0, 200_000)
    assert found is not None
    assert time.perf_counter() - begin < 5  # 0.1 s on an idle machine; a window per string would take minutes


def _calls(function: Callable[[], Any]) -> int:
    """How many functions of C a call calls."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "c_call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_vocabulary_is_located_and_decoded_whole_and_not_string_by_string() -> None:
    """The number of calls is that of arrays and windows, whatever the number of strings."""
    raw = b"".join(text("word" * (1 + i % 9)) for i in range(5000))
    data = np.frombuffer(raw, np.uint8)
    strings = find_strings(data, 0, 5000)
    assert strings is not None
    assert _calls(lambda: find_strings(data, 0, 5000)) < 100
    assert _calls(strings.decode) < 100
    with_nul = find_strings(np.frombuffer(raw + text("a\0b"), np.uint8), 0, 5001)
    assert with_nul is not None
    assert _calls(with_nul.decode) > 5000  # as a check of the count
    assert with_nul.decode()[-2:] == ["word" * (1 + 4999 % 9), "a\0b"]


def test_strings_at_the_edges_of_windows_and_of_the_file() -> None:
    for last in (b"", b"z", b"y" * 300):
        raw = b"".join(text("w" * 250) for _ in range(1100)) + text(last)  # 284 kB: more than one window
        data = np.frombuffer(raw, np.uint8)
        strings = find_strings(data, 0, 1101)
        assert strings is not None
        assert strings.end == len(raw)
        assert strings.decode() == ["w" * 250] * 1100 + [last.decode()]
        assert find_strings(data[: len(raw) - 1], 0, 1101) is None
        assert find_strings(data, 0, 1102) is None
