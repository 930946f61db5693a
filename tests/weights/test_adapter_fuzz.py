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
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_gguf import write_gguf_adapter
from roofline.weights.adapters import CONFIG, WEIGHTS, read_adapter
from roofline.weights.files.gguf_writer import header, write_tensors
from roofline.weights.files.mapped import TensorInfo
from tests.adapter_files import CONFIG as FIELDS
from tests.adapter_files import matrices, write_adapter

MOST_BYTES = 4 << 20  # of memory that reading may take; the files have 1 MiB at most
NAMES = ["__metadata__", "base_model.model.lm_head.lora_A.weight"]
NAMES += [f"base_model.model.model.layers.0.mlp.experts{within}.lora_A.weight" for within in ("", ".base_layer")]
NAMES += ["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([2**31, 2**63, 2**64, -1, 0, 1e308, "LORA", "F32", "BF16", "none", "\ud800"]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3)
)
patterns = st.dictionaries(
    st.sampled_from(["q_proj", "^model.layers.0.mlp.up_proj", r"layers\.0\..*", "(a+)+$", "mlp.experts.down_proj", ""]),
    st.integers(-1, 600) | scalars,
    max_size=3,
)
FIELD_NAMES = [*FIELDS, "init_lora_weights", "rank_pattern", "alpha_pattern", "target_parameters", "new"]
config_changes = st.dictionaries(st.sampled_from(FIELD_NAMES), values | patterns, max_size=3)
byte_changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    small = tiny_llama | {"num_hidden_layers": 1}
    return Path(write_adapter(tmp_path_factory.mktemp("adapter") / "a", matrices(small, 1)))


def read(path: Path) -> None:
    """Read it, as far as it can be read."""
    adapter, problem = None, ""
    tracemalloc.start()
    try:
        adapter = read_adapter(path, max_bytes=1 << 20)
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
    name=st.none() | st.text(max_size=40) | st.sampled_from(NAMES),
    entry=values | st.fixed_dictionaries({}, optional={"dtype": values, "shape": values, "data_offsets": values}),
)
def test_headers_of_matrices(folder, number, name, entry):
    header, data = header_and_data(folder)
    place = sorted(header)[number]
    before = header.pop(place)
    header[place if name is None else name] = {**before, **entry} if isinstance(entry, dict) else entry
    text = json.dumps(header).encode()
    read_changed(folder, weights=struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, tiny_llama):
    """Of one layer, and its experts: four of them."""
    config = {"family": "mixtral", "heads": 4, "kv_heads": 2, "experts": 4, "experts_per_token": 2}
    place = tmp_path_factory.mktemp("gguf")
    small = tiny_llama | {"num_hidden_layers": 1}
    adapter = read_adapter(write_adapter(place / "a", matrices(small, 1))).matrices
    dense = [each for each in adapter if ".mlp." not in each.tensor]
    values = np.ones((2, 16), np.float32)
    experts = [AdapterMatrix(f"layers.0.mlp.experts.{i}.{part}.weight", values, values, 1.0)
               for i in range(4) for part in ("gate", "up", "down")]  # fmt: skip
    write_gguf_adapter(place / "a.gguf", config, [*dense, *experts])
    assert len(read_adapter(place / "a.gguf").matrices) == 16
    return place / "a.gguf"


@fuzzed
@given(changes=byte_changes, cut=st.integers(0, 1 << 12), within=st.sampled_from([100, 400, 2000, 1 << 20]))
def test_bytes_of_gguf_files(gguf_file, changes, cut, within):
    """within: of so many first bytes, where the counts, keys and tensors are."""
    raw = bytearray(gguf_file.read_bytes())
    for at, value in changes:
        raw[at % min(within, len(raw))] = value
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.gguf"
        path.write_bytes(bytes(raw[: len(raw) - cut]))
        read(path)


GGUF_KEYS = ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha", "adapter.x")
gguf_values = st.one_of(
    st.sampled_from(["lora", "adapter", "llama", "gemma2", "gpt2"]), st.booleans(), st.floats(),
    st.integers(-(1 << 63), (1 << 64) - 1), st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip
GGUF_NAMES = ("blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight", "blk.07.attn_q.weight", "output.weight", "x")
shapes = st.lists(st.integers(1, 70), min_size=1, max_size=4)


@fuzzed
@given(
    changes=st.dictionaries(st.sampled_from(GGUF_KEYS), gguf_values, max_size=3),
    a=shapes, b=shapes, name=st.sampled_from(GGUF_NAMES),
)  # fmt: skip
def test_keys_and_shapes_of_gguf_files(changes, a, b, name):
    metadata = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"} | changes
    infos = [TensorInfo(f"{name}.lora_{part}", "F32", tuple(shape), 4 * int(np.prod(shape)))
             for part, shape in (("a", a), ("b", b)) if np.prod(shape) < 1 << 18]  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.gguf"
        with path.open("wb") as stream:
            stream.write(header(metadata, infos))
            write_tensors(stream, infos, lambda info: [np.zeros(info.nbytes, np.uint8)])
        read(path)
