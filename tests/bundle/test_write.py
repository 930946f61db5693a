"""Writing bundles: whole or not at all, whatever happens meanwhile; and the versions that must move with the layout."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_models import write_model

import roofline._native as native
from roofline.bundle import compile_model, load, manifest
from roofline.bundle.origins import source_of
from roofline.bundle.reader import is_bundle, verify
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError

CLI = "import sys; from roofline.cli.main import main; sys.exit(main())"

# Digests of what is in bundles, by version. Where a test below fails, the layout or the operations have changed: raise
# kLayoutVersion (native/formats.h) or kCodeVersion (native/executable.h) and put the new digest here.
# Version -> number of formats and the digest of their tiles: more formats do not raise it.
LAYOUT = {
    1: {
        9: "ffca09b07eeead794bdc3cae375a5c87",
        20: "d32e700f693bdf3933e1b6108c163375",
        24: "49bf76dc0d22f597331604fdecc417ea",
    }
}
CODE = {
    1: {
        "operations.txt": "aba03c8529c20a4600572c56e92aae94",
        "operations_mpt.txt": "6a41f69b91e29ec8a374c0fd07ebdc9f",
    },
    2: {
        "operations.txt": "e7f0575b696d71cc319a14709b73bd2b",
        "operations_mpt.txt": "18a17fe9c7397a9809b76559208c4e1b",
    },
}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def compile_command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-c", CLI, "compile", str(source), "-o", str(out)]


def test_the_packed_layout_has_its_version() -> None:
    from roofline.ops import formats

    digest, kept = hashlib.sha256(), LAYOUT[native.versions()[0]]
    for number, name in enumerate(native.format_names()):
        form, rows, columns = formats.get(name), 40, 512
        size = rows * columns // form.block * form.block_bytes
        raw = (np.arange(size, dtype=np.uint32) * 2654435761 >> 16).astype(np.uint8)
        memory = native.Memory(3 * native.tile_bytes(number, columns))
        native.pack(number, raw, rows, columns, memory.address, 1)
        digest.update(memory.view()[: 3 * native.tile_bytes(number, columns)])
        assert digest.hexdigest()[:32] == kept.get(number + 1, digest.hexdigest()[:32]), name
    assert len(native.format_names()) in kept


@pytest.mark.parametrize("kept", CODE[2])
def test_the_operations_have_their_version(kept: str) -> None:
    """Programs that have every op between them, kept as they were: passes may make others."""
    from roofline.backends.cpu.layout import lay_out
    from roofline.backends.cpu.lower import keep_operands, lower
    from roofline.backends.cpu.lowered import Identity, to_bytes
    from roofline.program.text import parse_program

    program = parse_program(Path(__file__).with_name(kept).read_text())
    lowered = lower(keep_operands(program), lay_out(program, 64))
    data = to_bytes(lowered, Identity("00" * 32, "11" * 32, 1, (2, 3)), (1, 1))
    assert hashlib.sha256(data).hexdigest()[:32] == CODE[native.versions()[1]][kept]


def test_a_bundle_is_replaced_and_nothing_else_is(model: Path, bundle: Path, tmp_path: Path) -> None:
    held = load(str(bundle), text=False)
    other = write_model(tmp_path / "other", seed=1)
    compile_model(str(other), bundle)
    assert source_of(verify(bundle).manifest.id) == str(other)
    assert left(tmp_path) == ["bundle", "model", "other"]
    held.executable.forward()  # what was open stays usable
    folder, file, empty = tmp_path / "folder", tmp_path / "file", tmp_path / "empty"
    folder.mkdir()
    (folder / "precious").write_text("x")
    file.write_text("x")
    empty.mkdir()
    for out in (folder, file):
        with pytest.raises(ConfigError, match="is there and is no bundle"):
            compile_model(str(model), out)
    with pytest.raises(ConfigError, match="a part of the path is a file"):
        compile_model(str(model), file / "below")
    assert left(folder) == ["precious"]
    assert is_bundle(compile_model(str(model), empty).path)
    assert is_bundle(compile_model(str(model), tmp_path / "new" / "deep").path)
    link = tmp_path / "link"
    link.symlink_to(empty)
    compile_model(str(other), link)
    assert link.is_symlink()
    assert source_of(verify(empty).manifest.id) == str(other)


def test_failures_leave_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out" / "bundle"
    out.parent.mkdir()

    def fail_with(error: BaseException, name: str) -> None:
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> Any:
                raise error

            patch.setattr(name, fail)
            with pytest.raises(type(error) if not isinstance(error, OSError) else ConfigError):
                compile_model(str(model), out)
        assert left(out.parent) == []

    for error in (KeyboardInterrupt(), OSError(28, "No space left on device"), ConfigError("x")):
        for name in ("_write_image", "_check", "_text_files", "_write", "_sync"):
            fail_with(error, f"roofline.bundle.writer.{name}")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CapacityError, match="bytes of disk"):
        compile_model(str(model), out)
    assert left(out.parent) == []
    (model / "config.json").write_text((model / "config.json").read_text().replace('"llama"', '"unheard-of"'))
    with pytest.raises((UnsupportedError, ConfigError)):
        compile_model(str(model), out)
    assert left(out.parent) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission(model: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(ConfigError, match="permission is missing"):
        compile_model(str(model), tmp_path / "locked" / "bundle")


def test_a_file_size_limit(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "bundle"
    out.parent.mkdir()
    words = " ".join(f"'{word}'" for word in compile_command(model, out))
    done = subprocess.run(["bash", "-c", f"ulimit -f 100; {words}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "limit on the size of files" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(out.parent) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_compile(model: Path, tmp_path: Path, number: int) -> None:
    """Killed while it writes: no directory of the bundle's name, and the next compile clears away what is left."""
    out = tmp_path / "out" / "bundle"
    out.parent.mkdir()
    slow = (
        "import time\nfrom roofline.bundle import writer\nold = writer._check\n"
        "def check(*a): print('here', flush=True); time.sleep(60)\nwriter._check = check\n"
    )
    command = [sys.executable, "-c", slow + CLI, "compile", str(model), "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    process.wait(20)
    process.stdout.close()
    parts = left(out.parent)
    assert "bundle" not in parts
    if number == signal.SIGINT:
        assert parts == []
        return
    assert len(parts) == 1
    old = time.time() - 3600
    os.utime(out.parent / parts[0], (old, old))
    compile_model(str(model), out)
    assert left(out.parent) == ["bundle"]


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "bundle"
    both = [subprocess.Popen(compile_command(model, out), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    verify(out)
    assert left(out.parent) == ["bundle"]


def test_the_commands(model: Path, bundle: Path, tmp_path: Path) -> None:
    def roofline(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", CLI, *words], capture_output=True, text=True, timeout=60)

    done = roofline("compile", str(model), "-o", str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    assert "MiB in " in done.stdout
    assert "whole, 6 files" in roofline("doctor", "--verify", str(bundle)).stdout
    raw = bytearray((bundle / "weights.bin").read_bytes())
    raw[50000] ^= 1
    (bundle / "weights.bin").write_bytes(raw)
    done = roofline("doctor", "--verify", str(bundle))
    assert done.returncode == 1
    assert f"weights.bin is not as it was written: its hash is wrong. Compile it again: roofline compile {model}" in (
        done.stderr
    )


def test_a_bundle_is_equal_whatever_its_source_is_called(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    elsewhere = Path(shutil.copytree(model, tmp_path / "elsewhere" / "of another name"))
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(model)
    bundles = [
        compile_model(str(source), tmp_path / f"bundle{i}").path
        for i, source in enumerate((model, "../model", ".", "../link", elsewhere))
    ]
    contents = [{file.name: file.read_bytes() for file in bundle.iterdir()} for bundle in bundles]
    for other in contents[1:]:
        assert other == contents[0]
    assert not any(str(tmp_path).encode() in data for data in contents[0].values())
    manifest = verify(bundles[0]).manifest
    assert manifest.source == {"kind": "safetensors", "licence": "apache-2.0"}
    assert manifest.name.startswith("llama ")


def test_a_bundle_without_a_tokenizer_does_not_say_where_its_source_was(tmp_path: Path) -> None:
    sources = [write_model(tmp_path / name, tokenizer=False) for name in ("one", "another")]
    texts = [
        (compile_model(str(source), tmp_path / f"{source.name}.bundle").path / "manifest.json").read_text()
        for source in sources
    ]
    assert texts[0] == texts[1]
    assert str(tmp_path) not in texts[0]
    assert "tokenizer.json" in texts[0]


def test_what_the_tests_compile_is_remembered_in_a_home_of_theirs(compiled_bundle: Path, home_of_tests: Path) -> None:
    assert (home_of_tests / "origins" / f"{manifest.read(compiled_bundle).id}.json").is_file()
