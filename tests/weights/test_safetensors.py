"""The safetensors reader: what the safetensors package writes, shards, and ConfigError on every bad file."""

import contextlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.weights.files.safetensors import _DTYPE_BITS, INDEX, SafetensorsFile, SafetensorsModel

Write = Callable[..., Path]
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="the oracle is the safetensors package")
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((4, 2), np.float16),
        "scalar": np.array(3.0, np.float32),
        "none": np.zeros((0, 5), np.float32),
    }
    library.save_file(tensors, tmp_path / "t.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "t.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
        assert file.read(name).tobytes() == values.tobytes()
    with pytest.raises(ConfigError, match="no tensor 'z'"):
        file.read("z")


def _with(**changes: Any) -> bytes:
    return pack({"w": {**ENTRY, **changes}}, bytes(24))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (b"\0" * 7, "header length"),
    "length 2^64-1": (pack({}, length=2**64 - 1), "header length.*18446744073709551615"),
    "length 2^32": (pack({}, length=2**32), "header length.*4294967296"),
    "length past the end": (pack({}, length=3), "header length.*truncated"),
    "length 0": (pack(b""), "does not begin"),
    "not JSON": (pack(b"{nope"), "header.*not JSON"),
    "not an object": (pack(b"[1]"), "does not begin"),
    "not UTF-8": (pack(b'{"\xff":1}'), "header.*not JSON"),
    "nested a million deep": (pack(b'{"a":' + b"[" * 1_000_000), "nested too deeply"),
    "objects a million deep": (pack(b'{"a":' * 1_000_000), "nested too deeply"),
    "number of a million digits": (pack(b'{"a":' + b"9" * 1_000_000 + b"}"), "not JSON"),
    "same name twice": (pack(b'{"w":1,"w":2}'), "'w' appears twice"),
    "entry is a number": (pack({"w": 5}), "'w'.*exactly"),
    "entry lacks shape": (pack({"w": {"dtype": "F32", "data_offsets": [0, 0]}}), "'w'.*exactly"),
    "entry has more": (_with(more=1), "'w'.*exactly"),
    "unknown dtype": (_with(dtype="F31"), "'w': dtype.*F31"),
    "dtype a list": (_with(dtype=["F32"]), "'w': dtype"),
    "shape a number": (_with(shape=6), "'w': shape"),
    "shape negative": (_with(shape=[-2, -3]), "'w': shape"),
    "shape true": (_with(shape=[True, 6]), "'w': shape"),
    "shape of floats": (_with(shape=[2.0, 3.0]), "'w': shape"),
    "nine dimensions": (_with(shape=[1] * 8 + [6]), "'w': shape"),
    "product 2^64": (_with(shape=[2**32, 2**32]), "'w': data_offsets"),
    "product 0 in 64 bits": (_with(shape=[2**62, 2**62, 6]), "'w': data_offsets"),
    "dimension 2^64": (_with(shape=[2**64]), "'w': shape"),
    "offsets reversed": (_with(data_offsets=[24, 0]), "'w': data_offsets"),
    "offsets negative": (_with(data_offsets=[-24, 0]), "'w': data_offsets"),
    "offsets of three": (_with(data_offsets=[0, 12, 24]), "'w': data_offsets"),
    "offsets too wide": (_with(data_offsets=[0, 28]), "'w': data_offsets.*28 bytes"),
    "offsets past the end": (_with(data_offsets=[24, 48]), "'w'.*hole"),
    "odd half bytes": (pack({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"), "data_offsets"),
    "overlap": (pack({"v": ENTRY, "w": {**ENTRY, "data_offsets": [12, 36]}}, bytes(36)), "'w'.*overlap"),
    "hole": (pack({"v": ENTRY, "w": {**ENTRY, "data_offsets": [28, 52]}}, bytes(52)), "'w'.*hole"),
    "bytes left over": (pack({"w": ENTRY}, bytes(25)), "cover 24 bytes"),
    "bytes missing": (pack({"w": ENTRY}, bytes(23)), "truncated"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_by_file_and_field(case: str, write: Write) -> None:
    content, field = HOSTILE[case]
    path = write(content, "model.safetensors")
    with pytest.raises(ConfigError, match=field) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


GOOD = pack({"v": ENTRY, "w": {**ENTRY, "data_offsets": [24, 48]}, "__metadata__": {"format": "pt"}}, bytes(48))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.one_of(st.binary(min_size=1, max_size=3), st.from_regex(rb"\d+"))),
        min_size=1,
        max_size=4,
    )
)
def test_mutated_files_never_crash(edits: list[tuple[int, bytes]], write: Write) -> None:
    content = bytearray(GOOD)
    for position, raw in edits:
        content[position : position + len(raw)] = raw
    with contextlib.suppress(ConfigError):
        SafetensorsFile(write(bytes(content), "model.safetensors"))


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, their index, and a configuration."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, tensor in (("one", "v"), ("two", "w")):
        (tmp_path / f"{name}.safetensors").write_bytes(pack({tensor: ENTRY}, bytes([ord(tensor)]) * 24))
    _index(tmp_path, {"v": "one.safetensors", "w": "two.safetensors"})
    return tmp_path


def _index(folder: Path, placed: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_shards_are_joined(folder: Path) -> None:
    model = SafetensorsModel(folder)
    assert sorted(model.tensors) == ["v", "w"]
    assert model.read("w").tobytes() == b"w" * 24
    assert model.config == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("placed", "field"),
    [
        ({"v": "one.safetensors", "w": "one.safetensors"}, "'w'.*in no file"),
        ({"v": "two.safetensors", "w": "one.safetensors"}, "'v'.*does not place"),
        ({"v": "one.safetensors", "w": "two.safetensors", "x": "two.safetensors"}, "'x'.*in no file"),
        ({"v": "one.safetensors", "w": "three.safetensors"}, "three.safetensors.*cannot be read"),
        ({"v": "../one.safetensors", "w": "two.safetensors"}, "weight_map.*not the name"),
        ({"v": "/etc/passwd", "w": "two.safetensors"}, "weight_map.*not the name"),
        ({"v": "one.bin", "w": "two.safetensors"}, "weight_map.*not the name"),
        ({"v": 1}, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_bad_index_is_refused(folder: Path, placed: Any, field: str) -> None:
    _index(folder, placed)
    with pytest.raises(ConfigError, match=field):
        SafetensorsModel(folder)


def test_shard_that_the_index_does_not_name_is_not_opened(folder: Path) -> None:
    _index(folder, {"v": "one.safetensors"})
    assert list(SafetensorsModel(folder).tensors) == ["v"]


def test_tensor_in_two_shards_is_refused(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(
        pack({"w": ENTRY, "v": {**ENTRY, "data_offsets": [24, 48]}}, bytes(48)),
    )
    with pytest.raises(ConfigError, match=r"'v'.*is also in one"):
        SafetensorsModel(folder)


def test_folder_without_index_needs_one_file(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match="2 safetensors files"):
        SafetensorsModel(folder)
    (folder / "two.safetensors").unlink()
    assert list(SafetensorsModel(folder).tensors) == ["v"]


@pytest.mark.parametrize("content", ["[]", "{", "", '{"a": 1, "a": 2}', "[" * 100_000])
def test_bad_config_json_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        SafetensorsModel(folder)


def test_limits_are_where_they_are_said_to_be(write: Write) -> None:
    for length, said in ((100_000_000, "truncated"), (100_000_001, "are more than the 100000000 allowed")):
        with pytest.raises(ConfigError, match=said):
            SafetensorsFile(write(pack({}, length=length), "model.safetensors"))
    assert SafetensorsFile(write(pack({}), "model.safetensors")).tensors == {}
    with pytest.raises(ConfigError, match="header length: 3 bytes, 2 are left"):
        SafetensorsFile(write(pack({}, length=3), "model.safetensors"))
    with pytest.raises(ConfigError, match="the file has only 7 bytes"):
        SafetensorsFile(write(bytes(7), "model.safetensors"))
    with pytest.raises(ConfigError, match="does not begin"):  # eight bytes are a length
        SafetensorsFile(write(bytes(8), "model.safetensors"))
    assert SafetensorsFile(write(_with(shape=[1] * 7 + [6]), "m")).tensors["w"].shape == (1,) * 7 + (6,)
    empty = pack({"w": {"dtype": "F32", "shape": [2**63 - 1, 0], "data_offsets": [0, 0]}})
    assert SafetensorsFile(write(empty, "m")).tensors["w"].shape == (2**63 - 1, 0)
    with pytest.raises(ConfigError, match="is not a list of at most 8 sizes"):
        SafetensorsFile(write(empty.replace(str(2**63 - 1).encode(), str(2**63).encode()), "m"))


@pytest.mark.parametrize("dtype", [*_DTYPE_BITS])
def test_elements_have_the_bits_of_their_dtype_s_name(dtype: str, write: Write) -> None:
    bits = 8 if dtype == "BOOL" else int("".join(itertools.takewhile(str.isdigit, dtype.lstrip("BCFIU"))))
    good = pack({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, bits // 2]}}, bytes(bits // 2))
    assert SafetensorsFile(write(good, "model.safetensors")).tensors["w"].nbytes == bits // 2
