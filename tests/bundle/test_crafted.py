"""Text files of a bundle that lie, with right hashes, end in one of our errors and in no crash, in Python and in C."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roofline.bundle import load
from roofline.bundle.manifest import BundleError


def rewrite(bundle: Path, name: str, data: bytes) -> None:
    """Another text of a file, signed."""
    (bundle / name).write_bytes(data)
    values = json.loads((bundle / "manifest.json").read_text())
    values["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    values["id"] = hashlib.sha256(json.dumps(values | {"id": ""}, sort_keys=True).encode()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"table rope0", b"table other", "uses the unknown table"),
        (b"cache kv0 = ", b"cache kv9 = ", "belongs to no group"),
        (b"input ids: i32", b"input ids: i99", "i99 is no type of values"),
        (b"output ", b"output un", "is never assigned"),
        (b"program ", b"\xff\xfe ", "is no UTF-8"),
        (b"rms_norm", b"rms_nerm", "is no program"),
    ],
)
def test_a_program_that_lies(bundle: Path, old: bytes, new: bytes, message: str) -> None:
    text = (bundle / "program.txt").read_bytes()
    assert old in text
    rewrite(bundle, "program.txt", text.replace(old, new, 1))
    with pytest.raises(BundleError, match=rf"program\.txt.*{message}"):
        load(str(bundle), text=False, kv_cache_dtype="int8")


def test_a_template_that_is_no_text(bundle: Path) -> None:
    rewrite(bundle, "template.jinja", b"\xff{{ messages }}")
    with pytest.raises(BundleError, match=r"template\.jinja is no UTF-8"):
        load(str(bundle))


def test_a_sampling_that_cannot_be(bundle: Path) -> None:
    values = json.loads((bundle / "manifest.json").read_text())
    values["generation"]["sampling"] = {"top_p": 7.0}
    (bundle / "manifest.json").write_text(json.dumps(values))
    rewrite(bundle, "template.jinja", b"{{ messages }}")
    with pytest.raises(BundleError, match="generation has a top_p that sampling cannot have"):
        load(str(bundle))


def test_an_outline_that_is_missing(bundle: Path) -> None:
    values = json.loads((bundle / "manifest.json").read_text())
    del values["generation"]["outline"]
    (bundle / "manifest.json").write_text(json.dumps(values))
    rewrite(bundle, "template.jinja", b"{{ messages }}")
    with pytest.raises(BundleError, match="generation is not what it should be"):
        load(str(bundle))


def crafted(tries: int, seed: int) -> None:
    """In a process of its own, which may die."""
    script = Path(__file__).with_name("crafted_bundles.py")
    command = [sys.executable, str(script), "--tries", str(tries), "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tries} tries, 0 failed" in done.stdout


def test_crafted_bundles_are_refused_or_run(files: object) -> None:
    crafted(40, 0)


@pytest.mark.slow
@pytest.mark.soak
def test_many_crafted_bundles_are_refused_or_run(files: object) -> None:
    crafted(1000, 1)


@pytest.mark.slow
@pytest.mark.soak
def test_very_many_crafted_bundles_are_refused_or_run(files: object) -> None:
    crafted(3000, 2)
