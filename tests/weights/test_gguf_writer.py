"""GGUF files that we write are what our own reader, and the package gguf, read."""

import struct
from pathlib import Path

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.gguf_writer import file_bytes, header, write_tensors
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.files.output import new_file

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "small": 7,
    "below": -7,
    "large": 1 << 40,
    "huge": (1 << 64) - 1,
    "half": 0.5,
    "tenth": 0.1,  # no float32
    "yes": True,
    "strings": ["a", "", "ü\0x"],
    "numbers": [1, -2, 3],
    "scores": [0.5, 1, -2.0],
    "flags": [True, False],
    "nothing": [],
}


def _write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    infos = [TensorInfo(name, form, v.shape, formats.get(form).nbytes(v.shape)) for name, (form, v) in tensors.items()]
    head = header(METADATA, infos)

    def pieces(info: TensorInfo) -> list[np.ndarray]:
        form, values = tensors[info.name]
        raw = formats.get(form).quantize(values)
        return [raw[:7], raw[7:]]

    with new_file(path, file_bytes(head, infos)) as stream:
        stream.write(head)
        write_tensors(stream, infos, pieces)
    assert path.stat().st_size == file_bytes(head, infos)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, tuple[str, np.ndarray]]]:
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    tensors = {"a.weight": ("Q8_0", values), "b.weight": ("F32", values[0, :5]), "c.weight": ("BF16", values)}
    _write(tmp_path / "new.gguf", tensors)
    return tmp_path / "new.gguf", tensors


def test_what_is_written_is_read_back(written):
    path, tensors = written
    file = GGUFFile(path)
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    for name, (form, values) in tensors.items():
        assert file.tensors[name].shape == values.shape
        assert file.tensors[name].format == form
        assert np.array_equal(file.read(name), formats.get(form).quantize(values))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((0, 4), ((1 << 32) - 1, 4), (1 << 32, 11), ((1 << 63) - 1, 11), (1 << 63, 10), ((1 << 64) - 1, 10)),
        *((-1, 5), (-(1 << 31), 5), (-(1 << 31) - 1, 11), (-(1 << 63), 11)),
    ],
)
def test_integers_get_the_first_type_that_holds_them(value: int, kind: int) -> None:
    """uint32, int32, int64, uint64."""
    assert struct.unpack_from("<QcI", header({"k": value}, []), 24) == (1, b"k", kind)


def test_the_package_gguf_reads_the_same(written):
    gguf = pytest.importorskip("gguf")
    path, tensors = written
    reader = gguf.GGUFReader(path)
    types = {key: [kind.name for kind in reader.fields[key].types] for key in METADATA if METADATA[key]}
    assert types["small"] == ["UINT32"]
    assert types["half"] == ["FLOAT32"]
    assert types["tenth"] == ["FLOAT64"]
    assert types["numbers"] == ["ARRAY", "INT32"]
    assert types["scores"] == ["ARRAY", "FLOAT32"]
    assert types["huge"] == ["UINT64"]
    assert types["below"] == ["INT32"]
    assert types["flags"] == ["ARRAY", "BOOL"]
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == {
        name: formats.get(form).quantize(values).tobytes() for name, (form, values) in tensors.items()
    }


def test_a_value_without_a_type_is_refused():
    with pytest.raises(ConfigError, match=r"'odd'.*dict"):
        header({"odd": {}}, [])
    with pytest.raises(ConfigError, match=r"'odd'.*list of"):
        header({"odd": ["a", 1]}, [])


def _write_half(path: Path, error: type[BaseException]) -> None:
    with new_file(path, 10) as stream:
        stream.write(b"half")
        raise error


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new.bin"
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            _write_half(path, error)
        assert list(tmp_path.iterdir()) == []
    with new_file(path, 10) as stream:
        stream.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="is there already"), new_file(path, 1):
        pass
    assert path.read_bytes() == b"whole"
