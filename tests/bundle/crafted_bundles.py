"""Bundles whose text files lie, with right hashes: what a load is refused with, and whether a process dies of it.

`python tests/bundle/crafted_bundles.py --tries 2000 --seed 1` tries so many in child processes, a new one after a
crash, and prints every try that neither ran nor was refused with one of our errors.
"""

import argparse
import ctypes as c
import hashlib
import json
import mmap
import os
import struct
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import library_binding as lb
from bundle_models import write_model

from roofline.backends.cpu.library import library_files
from roofline.bundle import compile_model, load
from roofline.common.errors import RooflineError
from roofline.ops.batch import Segment

VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 1 << 31, 1 << 62, 1 << 70, 0.5, 1e300,
    "", "x", "cpu", "Q4_K", "\0", [], {}, [[]], [0], {"a": 1},
)  # fmt: skip
TEXTS = ("manifest.json", "program.txt", "tokenizer.bin", "template.jinja")


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything inside a value of JSON."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(way for key, value in inner for way in leaves(value, (*path, key)))]


def change_json(values: Any, random: Random) -> Any:
    way = random.choice(leaves(values)[1:])
    node = values
    for key in way[:-1]:
        node = node[key]
    if random.random() < 0.2:
        del node[way[-1]]
    elif isinstance(old := node[way[-1]], int) and random.random() < 0.5:
        node[way[-1]] = random.choice((old + 1, old - 1, -old, old * 2, old + 64))
    else:
        node[way[-1]] = random.choice(VALUES)
    return values


def change_bytes(data: bytes, random: Random) -> bytes:
    raw = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, count = random.randrange(len(raw)), random.choice((0, 1, 1, 4, 20))
        words = (
            b"",
            b"0",
            b"-1",
            b"9999999999",
            b"[",
            b"'",
            b"{% for m in messages %}",
            bytes([random.randrange(256)]),
        )
        raw[at : at + count] = random.choice((*words, bytes(raw[random.randrange(len(raw)) :][:count])))
    return bytes(raw)


def craft(whole: Path, bundle: Path, random: Random) -> None:
    """Makes `bundle` a lying copy of `whole`."""
    for file in bundle.iterdir():
        file.unlink()
    for file in whole.iterdir():
        os.link(file, bundle / file.name)
    manifest = json.loads((whole / "manifest.json").read_text())
    name = random.choice(TEXTS)
    if name == "manifest.json":
        manifest = change_json(manifest, random)
    else:
        data = (whole / name).read_bytes()
        if name == "tokenizer.bin" and random.random() < 0.7:
            (length,) = struct.unpack_from("<I", data, 7)
            header = json.dumps(change_json(json.loads(data[11 : 11 + length]), random)).encode()
            data = data[:7] + struct.pack("<I", len(header)) + header + data[11 + length :]
        else:
            data = change_bytes(data, random)
        (bundle / name).unlink()
        (bundle / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(manifest, dict):
        text = json.dumps({**manifest, "id": ""}, sort_keys=True)
        manifest["id"] = hashlib.sha256(text.encode()).hexdigest()
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def attempt(bundle: Path, library: lb.Library, random: Random) -> str:
    """What came of a bundle in Python and in C. Raises whatever is no error of ours."""
    came = []
    try:
        kv_dtype, cache = random.choice(("auto", "int8")), random.choice((64, 1024))
        loaded = load(str(bundle), threads=1, kv_cache_dtype=kv_dtype, cache_tokens=cache, check_weights="off")
        executable = loaded.executable
        length = min(40, executable.max_context)
        executable.batch.fill([Segment([1] * length, 0, [0, 1, 2])], [length - 1])
        executable.forward()
        executable.step_cost()
        assert loaded.tokenizer is not None
        assert loaded.chat_template is not None
        ids = loaded.chat_template.encode_chat(loaded.tokenizer, [{"role": "user", "content": "Hello you"}])
        loaded.tokenizer.decode([*loaded.tokenizer.encode("hello", add_special=True), *ids[:50], 7, 299])
        executable.close()
        came.append("run")
    except (RooflineError, MemoryError):
        came.append("refused")
    handle, options = c.c_void_p(), lb.Options(size=c.sizeof(lb.Options), threads=1, cache_tokens=64)
    if library.c.rl_open(str(bundle).encode(), c.byref(options), c.byref(handle)) == lb.OK:
        library.submit(handle, [1] * 20, lb.sampling(max_tokens=3))
        library.run(handle)
        length, ids_array, buffer = lb.SIZE(), (lb.INT * 3)(1, 7, 299), c.create_string_buffer(64)
        library.c.rl_decode(handle, ids_array, 3, buffer, 64, c.byref(length))
        library.close(handle)
        came.append("run")
    else:
        assert library.error()
        came.append("refused")
    return "/".join(came)


def run(whole: Path, folder: Path, seed: int, first: int, last: int, state: mmap.mmap) -> None:
    library, bundle, status = lb.Library(library_files().library), folder / "crafted", 0
    for index in range(first, last):
        struct.pack_into("<q", state, 0, index)
        random = Random(f"{seed} {index}")
        craft(whole, bundle, random)
        try:
            attempt(bundle, library, random)
        except BaseException as error:
            import traceback

            place = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"seed {seed} try {index}: {type(error).__name__}: {error} at {place.filename}:{place.lineno}",
                flush=True,
            )
            status += 1
    struct.pack_into("<q", state, 0, last)
    os._exit(min(status, 100))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = compile_model(str(write_model(folder / "model")), folder / "whole").path
        (folder / "crafted").mkdir()
        state, first = mmap.mmap(-1, 8), 0
        while first < options.tries:
            child = os.fork()
            if child == 0:
                run(whole, folder, options.seed, first, options.tries, state)
            _, status = os.waitpid(child, 0)
            (index,) = struct.unpack_from("<q", state)
            if os.WIFSIGNALED(status):
                print(f"seed {options.seed} try {index}: signal {os.WTERMSIG(status)}", flush=True)
                failures, index = failures + 1, index + 1
            failures += os.WEXITSTATUS(status)
            first = index
    print(f"{options.tries} tries, {failures} failed", flush=True)
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
