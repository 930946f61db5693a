"""Bundles whose text files lie, with right hashes: what a load is refused with, and whether a process dies of it.

`python tests/bundle/crafted_bundles.py --tries 2000 --seed 1` tries so many in child processes, a new one after a
crash, and prints every try that neither ran nor was refused with one of our errors.
"""

import argparse
import ctypes as c
import hashlib
import json
import os
import struct
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import library_binding as lb
from bundle_models import write_model

from roofline.backends.cpu.library import library_files
from roofline.bundle import compile_model, load
from roofline.common.errors import RooflineError
from roofline.ops.batch import Segment
from tests.crafting import Limits, change_bytes, change_json, in_children, report

TEXTS = ("manifest.json", "program.txt", "tokenizer.bin", "template.jinja")


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, bundle = compile_model(str(write_model(folder / "model")), folder / "whole").path, folder / "crafted"
        bundle.mkdir()
        library = lb.Library(library_files().library)

        def one(index: int) -> str:
            random = Random(f"{options.seed} {index}")
            craft(whole, bundle, random)
            return attempt(bundle, library, random)

        tally = in_children(one, options.tries, options.seconds, Limits(seconds=60.0, grown=1 << 36))
    return report({"bundle": tally})


if __name__ == "__main__":
    sys.exit(main())
