"""libroofline refuses what it cannot use, with a cause: arguments, places, damaged and lying bundles."""

import ctypes as c
import json
import math
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import library_binding as lb
import numpy as np
import pytest
from bundle_models import FOREIGN_CODE
from library_binding import Library, sampling

from roofline import _native


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature: -1 must be at least 0"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"temperature": math.inf}, "temperature: inf"),
        ({"top_p": 0}, "top_p: 0 must be more than 0 and at most 1"),
        ({"min_p": 1.5}, "min_p: 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0"),
        ({"presence_penalty": 3}, "presence_penalty: 3"),
        ({"frequency_penalty": -3}, "frequency_penalty: -3"),
        ({"top_k": -1}, "top_k"),
        ({"sample_index": -1}, "sample_index"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: 3 is more than max_tokens, 2"),
        ({"stop_ids": [300]}, "stop_ids: id 300 is not in the vocabulary of 300"),
        ({"bias_ids": [-1], "bias_values": [1]}, "bias_ids: id -1"),
        ({"bias_ids": [1, 1], "bias_values": [1, 2]}, "bias_ids: id 1 is given twice"),
        ({"bias_ids": [1], "bias_values": [101]}, "bias_values: 101"),
        ({"bias_ids": [1]}, "bias_values: is NULL, but bias_count is 1"),
        ({"stop_count": 2}, "stop_ids: is NULL, but its count is 2"),
        ({"size": 0}, "sampling: its size is not set"),
    ],
)
def test_sampling_that_cannot_be_used(library: Library, bundle: Path, fields: dict[str, Any], message: str) -> None:
    handle, request = library.open(bundle, threads=1, cache_tokens=64), c.c_uint64(7)
    status = library.c.rl_submit(handle, (lb.INT * 1)(1), 1, sampling(**fields), c.byref(request))
    assert (status, request.value) == (lb.INVALID, 7)
    assert message in library.error()
    assert library.step(handle) is None
    library.close(handle)


def test_prompts_that_cannot_be_used(library: Library, bundle: Path) -> None:
    handle, request = library.open(bundle, threads=1, cache_tokens=64), c.c_uint64()

    def submit(ids: list[int], **fields: Any) -> tuple[int, str]:
        array = (lb.INT * len(ids))(*ids)
        return library.c.rl_submit(handle, array, len(ids), sampling(**fields), c.byref(request)), library.error()

    assert submit([]) == (lb.INVALID, "ids: the prompt has no tokens")
    for wrong in (-1, 300, 2**31 - 1):
        assert submit([1, wrong]) == (lb.INVALID, f"ids: id {wrong} is not in the vocabulary of 300")
    status, message = submit([1] * 60, max_tokens=5)
    assert status == lb.CAPACITY
    assert message.startswith("A prompt of 60 tokens with an answer of 5 needs 65 tokens, 64 are available.")
    assert submit([1] * 64)[0] == lb.CAPACITY
    assert submit([1] * 63)[0] == lb.OK
    assert submit([1], max_tokens=2**31 - 1)[0] == lb.CAPACITY
    assert library.c.rl_submit(handle, None, 3, None, c.byref(request)) == lb.INVALID
    assert library.c.rl_submit(handle, (lb.INT * 1)(1), 1, None, None) == lb.INVALID
    assert library.error() == "request is NULL"
    assert [len(events) for events in library.run(handle).values()] == [1]
    library.close(handle)


def test_structs_of_other_versions(library: Library, bundle: Path) -> None:
    handle, request = library.open(bundle, threads=1, cache_tokens=64), c.c_uint64()
    older = lb.Sampling(size=12, temperature=0)  # ends after the first field, or inside the next one's padding
    assert library.c.rl_submit(handle, (lb.INT * 1)(1), 1, c.byref(older), c.byref(request)) == lb.OK

    class Newer(c.Structure):
        _fields_ = (("old", lb.Sampling), ("more", c.c_int64))

    newer = Newer(old=sampling(max_tokens=2), more=0)
    newer.old.size = c.sizeof(Newer)
    for value, wanted in ((0, lb.OK), (1, lb.UNSUPPORTED)):
        newer.more = value
        given = c.cast(c.pointer(newer), c.POINTER(lb.Sampling))
        assert library.c.rl_submit(handle, (lb.INT * 1)(1), 1, given, c.byref(request)) == wanted
    assert "field of a newer library" in library.error()
    info = lb.Info(size=16)
    assert library.c.rl_info(handle, c.byref(info)) == lb.OK
    assert info.name
    assert info.bundle is None
    library.close(handle)


def test_nulls_and_closed_engines(library: Library, bundle: Path) -> None:
    functions, event, size = library.c, lb.Event(), lb.SIZE()
    handle = library.open(bundle, threads=1, cache_tokens=64)
    assert functions.rl_open(None, None, c.byref(handle)) == lb.INVALID
    assert functions.rl_open(str(bundle).encode(), None, None) == lb.INVALID
    assert functions.rl_info(handle, None) == lb.INVALID
    assert functions.rl_info(handle, c.byref(lb.Info())) == lb.INVALID
    assert functions.rl_step(handle, None, 1, c.byref(size)) == lb.INVALID
    assert functions.rl_step(handle, c.byref(event), 0, c.byref(size)) == lb.INVALID
    assert functions.rl_step(handle, c.byref(event), 1, None) == lb.INVALID
    assert functions.rl_decode(handle, None, 1, None, 0, c.byref(size)) == lb.INVALID
    assert functions.rl_decode(handle, None, 0, None, 0, None) == lb.INVALID
    copy = c.c_void_p(handle.value)
    assert functions.rl_close(c.byref(handle)) == lb.OK
    assert handle.value is None
    assert functions.rl_close(c.byref(handle)) == lb.OK
    assert functions.rl_close(None) == lb.OK
    assert functions.rl_close(c.byref(copy)) == lb.INVALID
    another = library.open(bundle, threads=1, cache_tokens=64)
    for gone in (copy, None, c.c_void_p(12345)):
        assert functions.rl_step(gone, c.byref(event), 1, c.byref(size)) == lb.INVALID
        assert functions.rl_abort(gone, 1) == lb.INVALID
        assert "the engine is" in library.error()
    library.close(another)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"isa": b"mmx"}, lb.UNSUPPORTED, "instruction set 'mmx' is not supported: this chip or this build"),
        ({"threads": -1}, lb.INVALID, "threads=-1 must be from 1 to 1024"),
        ({"threads": 5000}, lb.INVALID, "threads=5000"),
        ({"cache_tokens": -5}, lb.INVALID, "cache_tokens=-5"),
        ({"cache_tokens": 1 << 30}, lb.CAPACITY, "the KV cache needs"),
        ({"max_length": 513}, lb.INVALID, "max_length=513 must be from 1 to 512"),
        ({"max_length": 100, "cache_tokens": 64}, lb.CAPACITY, "64 are available. Raise cache_tokens or lower max_len"),
        ({"max_sequences": -1}, lb.INVALID, "max_sequences=-1"),
        ({"max_step_tokens": 1 << 30}, lb.INVALID, "max_step_tokens"),
    ],
)
def test_options_that_cannot_be_used(
    library: Library, bundle: Path, options: dict[str, Any], status: int, message: str
) -> None:
    found, said = library.refused(bundle, **options)
    assert found == status
    assert message in said


def test_threads_that_cannot_be_started(compiled: Any, bundle: Path) -> None:
    program = compiled(
        "#include <roofline.h>\n#include <stdio.h>\n#include <sys/resource.h>\n"
        "int main(int argc, char **argv) {\n"
        "    struct rlimit limit = {1ul << 30, 1ul << 30};\n"  # bytes of addresses; a thread's stack takes 8 MiB
        "    rl_options options = RL_OPTIONS;\n"
        "    rl_engine *engine = NULL;\n"
        "    int many, few;\n"
        "    if (argc != 2 || setrlimit(RLIMIT_AS, &limit) != 0) return 2;\n"
        "    options.threads = 1000, options.cache_tokens = 64, many = rl_open(argv[1], &options, &engine);\n"
        '    printf("%s", rl_last_error());\n'
        "    options.threads = 1, few = rl_open(argv[1], &options, &engine);\n"
        "    rl_close(&engine);\n"
        "    return many == RL_ERROR_MEMORY && few == RL_OK ? 0 : 1;\n"
        "}\n"
    )
    done = subprocess.run([program, bundle], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert done.stdout.startswith("threads cannot be started: lower the option threads")


def test_places_that_are_no_bundle(library: Library, model: Path, bundle: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", model, model / "config.json", ""):
        status, message = library.refused(path)
        assert status == lb.BUNDLE
        assert "is no bundle" in message
        assert "roofline compile" in message
    for name in ("manifest.json", "code.bin", "weights.bin", "truth.bin", "tokenizer.bin"):
        for change in (lambda raw: raw[:-2], lambda raw: raw + b"x", lambda raw: b"", None):
            broken = tmp_path / "broken"
            shutil.copytree(bundle, broken)
            if change is None:
                (broken / name).unlink()
            else:
                (broken / name).write_bytes(change((bundle / name).read_bytes()))
            status, message = library.refused(broken)
            assert status == lb.BUNDLE, (name, message)
            assert name in message
            shutil.rmtree(broken)


def test_damaged_and_foreign_code(library: Library, bundle: Path, tmp_path: Path) -> None:
    raw = (bundle / "code.bin").read_bytes()
    for at, value, message in FOREIGN_CODE:
        changed = bytearray(raw)
        struct.pack_into("<q", changed, at, value)
        (bundle / "code.bin").write_bytes(changed)
        status, said = library.refused(bundle)
        assert status == lb.BUNDLE
        assert message in said
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "code.bin").write_bytes(raw)
    for change, message in (({"format": 1}, "has format 1"), ({"target": "gpu"}, "lowered for 'gpu'"), ({"id": 3}, "")):
        (bundle / "manifest.json").write_text(json.dumps(manifest | change))
        status, said = library.refused(bundle)
        assert status == lb.BUNDLE
        assert message in said


@pytest.mark.parametrize("drawn", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_code_that_lies_with_a_right_checksum(library: Library, bundle: Path, drawn: int) -> None:
    """Any number of code.bin may be anything: the bundle is refused, or runs, and nothing outside it is touched."""
    raw = (bundle / "code.bin").read_bytes()
    rng, refused = np.random.default_rng(0), 0
    places = [*range(56, 256, 8), *rng.integers(40, len(raw) // 8, drawn) * 8]
    for at in places:
        for value in (-2, 1 << 40, 12345679):
            changed = bytearray(raw)
            struct.pack_into("<q", changed, at, value)
            struct.pack_into("<q", changed, 48, zlib.crc32(changed[56:]))
            (bundle / "code.bin").write_bytes(changed)
            handle, options = c.c_void_p(), lb.Options(size=c.sizeof(lb.Options), threads=1, cache_tokens=32)
            status = library.c.rl_open(str(bundle).encode(), c.byref(options), c.byref(handle))
            refused += status != lb.OK
            if status == lb.OK:
                library.submit(handle, [1] * 20, sampling(max_tokens=3))
                library.run(handle)
                library.close(handle)
            else:
                assert status in (lb.BUNDLE, lb.CAPACITY, lb.INVALID), library.error()
    assert refused > len(places)


def test_code_of_a_rank(library: Library, bundle: Path) -> None:
    """With an exchange among ranks, whom a bundle does not have."""
    changed = bytearray((bundle / "code.bin").read_bytes())
    (operations,) = struct.unpack_from("<q", changed, 248)
    struct.pack_into("<q", changed, operations, _native.operations().index("exchange"))
    struct.pack_into("<q", changed, 48, zlib.crc32(changed[56:]))
    (bundle / "code.bin").write_bytes(changed)
    status, said = library.refused(bundle)
    assert status == lb.BUNDLE
    assert "an operation that this build does not know" in said


def test_manifests_that_nest(library: Library, bundle: Path) -> None:
    """Whatever is no business of the library's is read over, down to a depth that the stack holds."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for depth, wanted in ((50, lb.OK), (100_000, lb.BUNDLE)):
        text = json.dumps(manifest | {"generation": manifest["generation"] | {"outline": "DEEP"}})
        (bundle / "manifest.json").write_text(text.replace('"DEEP"', "[" * depth + "1e-5, -Infinity" + "]" * depth))
        handle, options = c.c_void_p(), lb.Options(size=c.sizeof(lb.Options), threads=1, cache_tokens=32)
        assert library.c.rl_open(str(bundle).encode(), c.byref(options), c.byref(handle)) == wanted, library.error()
        library.close(handle)


def test_damaged_weights_are_found_where_the_truth_is_known(library: Library, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    _, tensor, _, _, place, _ = manifest["truth"][0]
    with (bundle / "weights.bin").open("r+b") as file:
        file.seek(place + 100)
        byte = file.read(1)[0]
        file.seek(place + 100)
        file.write(bytes([byte ^ 0x40]))
    status, message = library.refused(bundle)
    assert status == lb.BUNDLE
    assert f"weights.bin does not hold what {tensor} was in its source" in message


@pytest.mark.parametrize("name", ["weights.bin", "tokenizer.bin", "template.jinja", "program.txt", "truth.bin"])
def test_verify_names_a_file_with_a_changed_byte(library: Library, bundle: Path, name: str) -> None:
    assert library.c.rl_verify(str(bundle).encode()) == lb.OK, library.error()
    raw = bytearray((bundle / name).read_bytes())
    raw[-1] ^= 1
    (bundle / name).write_bytes(raw)
    assert library.c.rl_verify(str(bundle).encode()) == lb.BUNDLE
    assert f"{name} is not as it was written" in library.error()


def test_a_manifest_that_names_files_elsewhere(library: Library, bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"]["../model/config.json"] = {"bytes": 1, "sha256": ""}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, said = library.refused(bundle)
    assert status == lb.BUNDLE
    assert "names a file outside the bundle" in said
    assert library.c.rl_verify(None) == lb.INVALID
