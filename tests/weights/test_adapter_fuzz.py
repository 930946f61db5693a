"""Whatever the files of an adapter hold, reading them gives an adapter or an error of ours, in bounded memory."""

import json
import shutil
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roofline.common.errors import RooflineError
from roofline.weights.adapters import CONFIG, WEIGHTS, read_adapter
from tests.adapter_files import CONFIG as FIELDS
from tests.adapter_files import matrices, write_adapter

MOST_BYTES = 4 << 20  # of memory that reading may take; the files have 1 MiB at most
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([2**31, 2**63, 2**64, -1, 0, 1e308, "LORA", "F32", "BF16", "none", "\ud800"]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3)
)
config_changes = st.dictionaries(st.sampled_from([*FIELDS, "init_lora_weights", "new"]), values, max_size=3)
byte_changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    small = tiny_llama | {"num_hidden_layers": 1}
    return Path(write_adapter(tmp_path_factory.mktemp("adapter") / "a", matrices(small, 1)))


def read(folder: Path) -> None:
    """Read it, as far as it can be read."""
    adapter, problem = None, ""
    tracemalloc.start()
    try:
        adapter = read_adapter(folder, max_bytes=1 << 20)
    except RooflineError as error:
        problem = str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < MOST_BYTES
    assert len(problem) < 4000
    for matrix in adapter.matrices if adapter is not None else ():
        assert all(np.isfinite(values).all() for values in (matrix.a, matrix.b, matrix.scale))


def read_changed(folder: Path, **contents: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "a"))
        for name, content in contents.items():
            (copy / {"config": CONFIG, "weights": WEIGHTS}[name]).write_bytes(content)
        read(copy)


def header_and_data(folder: Path) -> tuple[dict, bytes]:
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(changes=config_changes)
def test_configurations(folder, changes):
    read_changed(folder, config=json.dumps(FIELDS | changes).encode())


@fuzzed
@given(raw=st.binary(max_size=200), changes=byte_changes, cut=st.integers(0, 500))
def test_bytes_of_configurations(folder, raw, changes, cut):
    text = bytearray((folder / CONFIG).read_bytes()[: cut or None])
    for at, value in changes:
        text[at % len(text)] = value
    read_changed(folder, config=bytes(text))
    read_changed(folder, config=raw)


@fuzzed
@given(changes=byte_changes, cut=st.integers(0, 1 << 14), in_header=st.booleans())
def test_bytes_of_matrices(folder, changes, cut, in_header):
    raw = bytearray((folder / WEIGHTS).read_bytes())
    for at, value in changes:
        raw[at % (1000 if in_header else len(raw))] = value
    read_changed(folder, weights=bytes(raw[: len(raw) - cut]))


@fuzzed
@given(
    number=st.integers(0, 13),
    name=st.none() | st.text(max_size=40) | st.sampled_from(["__metadata__", "base_model.model.lm_head.lora_A.weight"]),
    entry=values | st.fixed_dictionaries({}, optional={"dtype": values, "shape": values, "data_offsets": values}),
)
def test_headers_of_matrices(folder, number, name, entry):
    header, data = header_and_data(folder)
    place = sorted(header)[number]
    before = header.pop(place)
    header[place if name is None else name] = {**before, **entry} if isinstance(entry, dict) else entry
    text = json.dumps(header).encode()
    read_changed(folder, weights=struct.pack("<Q", len(text)) + text + data)
